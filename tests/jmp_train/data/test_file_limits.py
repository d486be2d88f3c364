import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import cifar_bytes, idx_bytes
from machine_limits import memory_limited_to

from jmp_train.data.image_files import read_image
from jmp_train.data.public_images import read_cifar10_batch, read_idx

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
    "cifar": (CIFAR, {"max_bytes": 6145}, "it has 6146 bytes, more than the limit of 6145"),
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
        ("cifar", 400_000 * 3073, r"is too large: it has 1229200000 bytes, more than the limit of 1073741824$"),
        ("image", 2**31, "it has 2147483648 bytes, too many for max_pixels=894784"),
    ],
)
def test_a_file_that_is_too_large_is_not_read(tmp_path: Path, reader: str, size: int, message: str) -> None:
    path = tmp_path / "0.ppm"
    path.write_bytes(PPM if reader == "image" else CIFAR)
    os.truncate(path, size)  # of zeros that take no place
    with memory_limited_to(2**28), pytest.raises(ValueError, match=message):
        READERS[reader](path)
