import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import cifar_bytes, idx_bytes
from machine_limits import memory_limited_to

from jmp_train.data.image_files import read_image
from jmp_train.data.public_images import read_cifar10_batch, read_idx
from jmp_train.data.regular_files import open_regular, read_bytes

pytestmark = pytest.mark.quick

READERS: dict[str, Callable[..., Any]] = {
    "idx": lambda path, **bound: read_idx(path, axes=3, **bound),
    "cifar": read_cifar10_batch,
    "image": lambda path, **bound: read_image(str(path), **bound),
}
IDX = idx_bytes(np.arange(24, dtype=np.uint8).reshape(2, 3, 4))
CIFAR = cifar_bytes(np.zeros((2, 32, 32, 3), np.uint8), np.array([9, 0]))
PPM = b"P6 24 20 255 " + bytes(24 * 20 * 3)
# Of each reader a file, the largest bound that refuses it, and what is said then.
BOUNDS: dict[str, tuple[bytes, dict[str, int], str]] = {
    "idx": (IDX, {"max_bytes": 23}, "says 2 x 3 x 4 bytes, more than max_bytes=23$"),
    "cifar": (CIFAR, {"max_bytes": 6145}, "it has 6146 bytes, more than max_bytes=6145"),
    "image": (PPM, {"max_pixels": 479}, "it has 24 x 20 pixels, more than max_pixels=479"),
}


@pytest.mark.parametrize("reader", BOUNDS)
def test_the_bound_is_an_option(tmp_path: Path, reader: str) -> None:
    content, bound, message = BOUNDS[reader]
    path = tmp_path / "0.ppm"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        READERS[reader](path, **bound)
    READERS[reader](path, **{name: most + 1 for name, most in bound.items()})


@pytest.mark.parametrize(
    ("reader", "size", "message"),
    [
        ("cifar", 400_000 * 3073, r"is too large: it has 1229200000 bytes, more than max_bytes=1073741824; "),
        ("image", 2**31, "it has 2147483648 bytes, too many for max_pixels=894784"),
    ],
)
def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, reader: str, size: int, message: str) -> None:
    path = tmp_path / "0.ppm"
    path.write_bytes(PPM if reader == "image" else CIFAR)
    os.truncate(path, size)  # of zeros that take no place
    with memory_limited_to(2**28), pytest.raises(ValueError, match=message):
        READERS[reader](path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "socket", "missing", "loop", "empty"])
def test_what_is_no_regular_file_is_named_and_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's path has to be short
    path = tmp_path / "0.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "folder":
        path.mkdir()
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as server:
            server.bind("0.png")
    elif kind == "loop":
        path.symlink_to(path)
    elif kind == "empty":
        path.touch()
    faults = {
        "missing": r"No such file or directory: '.*/0\.png'",
        "loop": r"Too many levels of symbolic links: '.*/0\.png'",
        "empty": r"/0\.png (has|cannot be decoded)",
    }
    for read in READERS.values():
        with pytest.raises((ValueError, OSError), match=faults.get(kind, r"/0\.png is not a regular file$")):
            read(path)


def test_bytes_are_read_up_to_a_size(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"abc")
    assert read_bytes(path, max_bytes=3) == b"abc"
    with pytest.raises(ValueError, match=r"/text is too large: it has more than max_bytes=2$"):
        read_bytes(path, max_bytes=2)
    with pytest.raises(OSError, match="is not a regular file"):
        read_bytes(tmp_path)


def test_too_little_memory_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "images"
    path.touch()
    with pytest.raises(MemoryError) as caught, open_regular(path):
        bytearray(2**62)
    assert str(caught.value) == f"{path} needs more memory than is available"
