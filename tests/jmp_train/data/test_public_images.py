"""Files in MNIST's and CIFAR-10's formats: read as they were written, and damage is named with the file."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from image_files import cifar_bytes, idx_bytes, write_cifar
from machine_limits import memory_limited_to

from jmp_train.data.public_images import read_cifar10, read_cifar10_batch, read_idx

pytestmark = pytest.mark.quick

# --- MNIST ------------------------------------------------------------------------------------

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
IDX = idx_bytes(IMAGES)
ZIPPED_IDX = gzip.compress(IDX, mtime=0)  # without the time, by which tests would have other names


@pytest.mark.parametrize("content", [IDX, ZIPPED_IDX], ids=["plain", "gzip"])
def test_images_are_read_gzipped_or_not(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "images").write_bytes(content)
    np.testing.assert_array_equal(read_idx(tmp_path / "images", axes=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ZIPPED_IDX[:-9], "is a damaged or truncated gzip file: "),
        (ZIPPED_IDX[:15], "is a damaged or truncated gzip file: "),
        (ZIPPED_IDX[:-8] + b"12345678", "is a damaged or truncated gzip file: CRC"),
        (b"\x1f\x8b\x08\x00" + 30 * b"\xff", "is a damaged or truncated gzip file: "),
        (IDX[:-1], "has 23 bytes of data, but its header says 2 x 3 x 4"),
        (IDX + b"x", "has more than 24 bytes of data, but its header says 2 x 3 x 4"),
        (gzip.compress(IDX + b"x", mtime=0), "has more than 24 bytes of data, but its header says 2 x 3 x 4"),
        (gzip.compress(IDX[:-1], mtime=0), "has 23 bytes of data, but its header says 2 x 3 x 4"),
        (gzip.compress(b"", mtime=0), "has the magic number 0x; IDX"),
        (IDX[:10], "ends within its header, after 10 bytes"),
        (b"", "has the magic number 0x; IDX bytes with 3 axes have 0x00000803"),
        (idx_bytes(IMAGES[0, 0]), "has the magic number 0x00000801; IDX bytes with 3 axes have 0x00000803"),
        (b"\x00\x00\x0d\x03" + IDX[4:], "has the magic number 0x00000d03"),
    ],
)
def test_damage_is_named_with_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_idx(path, axes=3)
    assert str(caught.value).startswith(f"{path} ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def zeros(*shape: int, zipped: int) -> bytes:
    """Returns a gzip file with a header of that shape and so many zeros; 1,032 of them need a byte."""
    member = gzip.compress(bytes(2**20), 9, mtime=0)
    header = gzip.compress(struct.pack(">IIII", 0x803, *shape), mtime=0)
    return header + (zipped // 2**20) * member


BOMBS = {
    "bomb": (zeros(2_000_000, 28, 28, zipped=1_568_000_000), "is too large: its header says 2000000 x 28 x"),
    "behind_the_array": (zeros(2, 28, 28, zipped=2**31), "has more than 1568 bytes of data, but its header says 2 "),
    "header": (zeros(2**32 - 1, 28, 28, zipped=0), "is too large: its header says 4294967295 x 28 x 28 byt"),
    "empty": (zeros(0, 2**32 - 1, 2**32 - 1, zipped=0), "is too large: its header says 0 x 4294967295 x 4"),
    "short": (zeros(1_000_000, 28, 28, zipped=0), "has 0 bytes of data, but its header says 1000000 x "),
    "plain": (struct.pack(">IIII", 0x803, 2**31, 2**31, 2**31), "bytes, more than max_bytes=1073741824"),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_file_takes_no_large_memory(tmp_path: Path, name: str) -> None:
    content, message = BOMBS[name]
    path = tmp_path / "images.gz"
    path.write_bytes(content)
    assert len(content) < 3_000_000
    with memory_limited_to(2**30), pytest.raises(ValueError) as caught:
        read_idx(path, axes=3)
    assert str(caught.value).startswith(f"{path} ")
    assert message in str(caught.value)


def test_members_of_a_gzip_file_are_one_array(tmp_path: Path) -> None:
    path = tmp_path / "images.gz"
    path.write_bytes(gzip.compress(IDX[:20]) + gzip.compress(IDX[20:]) + bytes(100))
    np.testing.assert_array_equal(read_idx(path, axes=3), IMAGES)


# --- CIFAR-10 ---------------------------------------------------------------------------------

NAMES = [f"data_batch_{number}.bin" for number in range(1, 6)]
CIFAR_IMAGES = np.arange(2 * 3072, dtype=np.uint64).astype(np.uint8).reshape(2, 32, 32, 3)
CIFAR = cifar_bytes(CIFAR_IMAGES, np.array([9, 0]))


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
        (CIFAR[:-1], "has 6145 bytes and ends within row 1: rows have 3073 bytes, and the published"),
        (CIFAR + b"x", "has 6147 bytes and ends within row 2: rows have 3073 bytes"),
        (b"", "has 0 bytes and ends within row 0: "),
        (CIFAR + cifar_bytes(CIFAR_IMAGES, np.array([3, 10])), "has the label 10 at row 3; labels must be"),
    ],
)
def test_damage_to_rows_is_named_with_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    write_cifar(tmp_path, examples=1)
    path = tmp_path / "data_batch_2.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_cifar10(tmp_path)
    assert str(caught.value).startswith(f"{path} ")
    assert message in str(caught.value)
