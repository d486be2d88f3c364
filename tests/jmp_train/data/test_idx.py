import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
from image_files import idx_bytes
from machine_limits import memory_limited_to

from jmp_train.data.public_images import read_idx

pytestmark = pytest.mark.quick

IMAGES = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
GOOD = idx_bytes(IMAGES)
ZIPPED = gzip.compress(GOOD, mtime=0)  # without the time, by which tests would have other names


@pytest.mark.parametrize("content", [GOOD, ZIPPED], ids=["plain", "gzip"])
def test_images_are_read_gzipped_or_not(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "images").write_bytes(content)
    np.testing.assert_array_equal(read_idx(tmp_path / "images", axes=3), IMAGES)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ZIPPED[:-9], "is a damaged or truncated gzip file: "),
        (ZIPPED[:15], "is a damaged or truncated gzip file: "),
        (ZIPPED[:-8] + b"12345678", "is a damaged or truncated gzip file: CRC"),
        (b"\x1f\x8b\x08\x00" + 30 * b"\xff", "is a damaged or truncated gzip file: "),
        (GOOD[:-1], "has 23 bytes of data, but its header says 2 x 3 x 4"),
        (GOOD + b"x", "has more than 24 bytes of data, but its header says 2 x 3 x 4"),
        (gzip.compress(GOOD + b"x", mtime=0), "has more than 24 bytes of data, but its header says 2 x 3 x 4"),
        (gzip.compress(GOOD[:-1], mtime=0), "has 23 bytes of data, but its header says 2 x 3 x 4"),
        (gzip.compress(b"", mtime=0), "has the magic number 0x; IDX"),
        (GOOD[:10], "ends within its header, after 10 bytes"),
        (b"", "has the magic number 0x; IDX bytes with 3 axes have 0x00000803"),
        (idx_bytes(IMAGES[0, 0]), "has the magic number 0x00000801; IDX bytes with 3 axes have 0x00000803"),
        (b"\x00\x00\x0d\x03" + GOOD[4:], "has the magic number 0x00000d03"),
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
    path.write_bytes(gzip.compress(GOOD[:20]) + gzip.compress(GOOD[20:]) + bytes(100))
    np.testing.assert_array_equal(read_idx(path, axes=3), IMAGES)
