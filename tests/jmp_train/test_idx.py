import gzip
from pathlib import Path

import numpy as np
import pytest
from helpers import idx_bytes

from jmp_train.idx import read_idx

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
        (GOOD[:-1], "has 23 bytes of data, where its header says 2 x 3 x 4"),
        (GOOD + b"x", "has 25 bytes of data, where its header says 2 x 3 x 4"),
        (GOOD[:10], "ends within its header, after 10 bytes"),
        (b"", "has the magic number 0x, where IDX bytes with 3 axes have 0x00000803"),
        (idx_bytes(IMAGES[0, 0]), "0x00000801, where IDX bytes with 3 axes have 0x00000803"),
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
