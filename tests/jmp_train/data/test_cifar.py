from pathlib import Path

import numpy as np
import pytest
from image_files import cifar_bytes, write_cifar

from jmp_train.data.public_images import read_cifar10, read_cifar10_batch

pytestmark = pytest.mark.quick

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)]
IMAGES = np.arange(2 * 3072, dtype=np.uint64).astype(np.uint8).reshape(2, 32, 32, 3)
GOOD = cifar_bytes(IMAGES, np.array([9, 0]))


@pytest.mark.parametrize("folder", [".", "cifar-10-batches-bin"])
def test_what_was_written_is_read(tmp_path: Path, folder: str) -> None:
    (tmp_path / folder).mkdir(exist_ok=True)
    written = write_cifar(tmp_path / folder, examples=7)
    train, test = read_cifar10(tmp_path)
    for read, names in ((train, NAMES), (test, ["test_batch.bin"])):
        assert (read["image"].dtype, read["label"].dtype) == (np.uint8, np.uint8)
        assert read["image"].flags.c_contiguous
        np.testing.assert_array_equal(read["image"], np.concatenate([written[name][0] for name in names]))
        np.testing.assert_array_equal(read["label"], np.concatenate([written[name][1] for name in names]))


def test_rows_are_a_label_and_then_a_plane_a_color(tmp_path: Path) -> None:
    pixel = 1 + 32 * 3 + 5  # of row 3, column 5
    content = bytearray(3073)
    content[0], content[pixel], content[1024 + pixel], content[2048 + pixel] = 4, 10, 20, 30
    (tmp_path / "one.bin").write_bytes(bytes(content))
    batch = read_cifar10_batch(tmp_path / "one.bin")
    assert batch["label"].tolist() == [4]
    assert batch["image"][0, 3, 5].tolist() == [10, 20, 30]
    assert batch["image"].sum() == 60


def test_missing_files_are_named_with_size_and_source(tmp_path: Path) -> None:
    write_cifar(tmp_path, examples=1)
    (tmp_path / "data_batch_3.bin").unlink()
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(FileNotFoundError) as caught:
        read_cifar10(tmp_path)
    first, *lines = str(caught.value).splitlines()
    assert first == (
        f"data_dir {tmp_path} lacks files; CIFAR-10's are in "
        "cifar-10-binary.tar.gz of https://www.cs.toronto.edu/~kriz/cifar.html "
        "(md5 c32a1d4ab5d03f1284b67883e8d87530):"
    )
    assert lines == [
        f"  {name} or cifar-10-batches-bin/{name} (30730000 bytes)" for name in ("data_batch_3.bin", "test_batch.bin")
    ]
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        read_cifar10(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (GOOD[:-1], "has 6145 bytes and ends within row 1: rows have 3073 bytes, and the published"),
        (GOOD + b"x", "has 6147 bytes and ends within row 2: rows have 3073 bytes"),
        (b"", "has 0 bytes and ends within row 0: "),
        (GOOD + cifar_bytes(IMAGES, np.array([3, 10])), "has the label 10 at row 3; labels must be"),
    ],
)
def test_damage_is_named_with_file_and_row(tmp_path: Path, content: bytes, message: str) -> None:
    write_cifar(tmp_path, examples=1)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_cifar10(tmp_path)
    assert str(caught.value).startswith(f"{path} ")
    assert message in str(caught.value)
