"""Files of `torch.save` give the arrays that were saved, and a damaged one is named and runs no code."""

import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch_file_bytes import STORAGES, in_a_row, tensor, with_tensors, zipped

from jmp_train.graphs.file_formats.pickle_files import read_torch_arrays

pytestmark = pytest.mark.quick


def read(folder: Path, content: bytes, **options: Any) -> dict[str, np.ndarray]:
    (folder / "train.pt").write_bytes(content)
    return read_torch_arrays(folder / "train.pt", **options)


def fault(folder: Path, content: bytes) -> str:
    """Returns the message, one line, without the path that it starts with."""
    with pytest.raises(ValueError) as caught:
        read(folder, content)
    message = str(caught.value)
    assert "\n" not in message and message.startswith(f"{folder}/train.pt ")
    return message.removeprefix(f"{folder}/train.pt ")


@pytest.mark.parametrize("made", [zipped, in_a_row, with_tensors])
def test_the_arrays_come_back(tmp_path: Path, made: Callable[[Any], bytes]) -> None:
    arrays = {name: np.arange(6).reshape(3, 2).astype(name) for name in STORAGES}
    arrays |= {"none": np.zeros((0, 2), np.int64), "one axis": np.arange(4.0)}
    found = read(tmp_path, made(arrays))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)  # of the same shape and dtype


class Payload:
    """Whose pickle would run a command."""

    def __reduce__(self) -> Any:
        import os

        return os.system, ("touch hacked",)


@pytest.mark.parametrize("made", [zipped, in_a_row])
def test_nothing_is_called(tmp_path: Path, made: Callable[[Any], bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = fault(tmp_path, made({"edge": Payload()}))
    assert message == "asks for 'posix system', which no file of this kind needs; it was not called"
    assert not (tmp_path / "hacked").exists()


ONE = np.array([[0, 1]])
DAMAGED = "is not a torch file, or a damaged one: "


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", DAMAGED),
        (b"edge", DAMAGED),
        (in_a_row({"edge": ONE}, magic=1), DAMAGED + "it does not start with torch's magic number"),
        (in_a_row({"edge": ONE}, storages=["0"]), DAMAGED + "it has data after its arrays"),
        (in_a_row({"edge": ONE}) + b"\0", DAMAGED + "it has data after its arrays"),
        (zipped({"edge": ONE}, method=zipfile.ZIP_DEFLATED), DAMAGED + "'byteorder' is compressed, which torch"),
        (zipped({"edge": ONE}).replace(b"little", b"big   "), DAMAGED + "Bad CRC-32"),
        (zipped(b"\x80\x02" + b"N0" * 9_999 + b"}."), DAMAGED + "instruction POP is not allowed"),
        (zipped(b"\x80\x02" + b"K\1" * 10_000 + b"}."), DAMAGED + "it has more than 10000 instructions"),
        (zipped(b"\x80\x02}(X\1\0\0\0a" + tensor("0", ONE) + b"u."), DAMAGED + "'data/0'"),
    ],
)
def test_damaged_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    assert fault(tmp_path, content).startswith(message)


@pytest.mark.parametrize(
    ("instructions", "message"),
    [
        (tensor("0", ONE, count=3), "a tensor of shape (1, 2) has 2 numbers, where 3 are stored"),
        (tensor("0", ONE, first=1), "a tensor of shape (1, 2) has 2 numbers, where 2 are stored"),
        (tensor("0", ONE, strides=(0, 0)), "a tensor is not contiguous: save it after .contiguous()"),
        (tensor("0", ONE).replace(b"Long", b"Strange"), None),
        (tensor("0", ONE).replace(b"storage", b"storagE"), "the storage type of a tensor is unknown"),
    ],
)
def test_tensors_that_are_not_whole(tmp_path: Path, instructions: bytes, message: str | None) -> None:
    content = zipped(b"\x80\x02}(X\4\0\0\0edge" + instructions + b"u.", {"0": ONE.tobytes()})
    wanted = DAMAGED + message if message else "asks for 'torch StrangeStorage', which no file of this kind needs"
    assert fault(tmp_path, content).startswith(wanted)


def test_arrays_take_no_more_than_their_file(tmp_path: Path) -> None:
    """A thousand tensors of one storage, and a thousand names of one array."""
    numbers = np.zeros((1000, 2), np.int64)
    items = b"".join(b"X\2\0\0\0" + f"{n:2}".encode() + tensor("0", numbers) for n in range(99))
    shared = zipped(b"\x80\x02}(" + items + b"u.", {"0": numbers.tobytes()})
    for content in (shared, zipped(dict.fromkeys(map(str, range(1000)), numbers))):
        (tmp_path / "train.pt").write_bytes(content)
        with pytest.raises(ValueError, match=rf"its arrays would take more than its {len(content)} bytes"):
            read_torch_arrays(tmp_path / "train.pt")
