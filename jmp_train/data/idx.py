"""IDX, the file format of MNIST: big-endian arrays behind a magic number, gzipped or not."""

import gzip
import math
import zlib
from io import BufferedIOBase
from pathlib import Path

import numpy as np

from jmp_train.data.regular_files import open_regular

MAX_BYTES = 2**30  # EMNIST's largest file has 547 MB

_UNSIGNED_BYTES = 0x08  # the third byte of the magic number; the fourth is the number of axes
_GZIP = b"\x1f\x8b"
_PIECE = 2**20  # bytes to decompress at once


def read_idx(path: Path, axes: int, *, max_bytes: int = MAX_BYTES) -> np.ndarray:
    """Reads an IDX file of unsigned bytes.

    Args:
      path: the file, gzipped or not, whatever its name.
      axes: number of axes of the array: 3 for images, 1 for labels.
      max_bytes: the largest array to read. A megabyte of gzip can hold a gigabyte.

    Returns:
      A uint8 array.

    Raises:
      ValueError: the file is not such an IDX file, is incomplete, or has more than `max_bytes` by its header; the
        message names the file and the fault.
      OSError: the file cannot be opened, or is not a regular one.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "labels"
      >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 5]))
      >>> read_idx(file, axes=1)
      array([7, 5], dtype=uint8)

    Reference: http://yann.lecun.com/exdb/mnist (the format's description).
    """
    with open_regular(path) as file:
        start = file.read(len(_GZIP))
        file.seek(0)
        if start != _GZIP:
            return _read_array(path, file, axes, max_bytes)
        try:
            with gzip.GzipFile(fileobj=file) as content:
                return _read_array(path, content, axes, max_bytes)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a damaged or truncated gzip file: {error}") from None


def _read_array(path: Path, content: BufferedIOBase, axes: int, max_bytes: int) -> np.ndarray:
    header = content.read(4 + 4 * axes)
    magic, wanted = header[:4], bytes([0, 0, _UNSIGNED_BYTES, axes])
    if magic != wanted:
        raise ValueError(
            f"{path} has the magic number 0x{magic.hex()}; IDX bytes with {axes} "
            f"{'axis' if axes == 1 else 'axes'} have 0x{wanted.hex()}"
        )
    if len(header) < 4 + 4 * axes:
        raise ValueError(f"{path} ends within its header, after {len(header)} bytes")
    shape = [int(n) for n in np.frombuffer(header, ">u4", axes, offset=4)]
    says, count = f"its header says {' x '.join(map(str, shape))}", math.prod(shape)
    if math.prod(n for n in shape if n) > max_bytes:  # NumPy also refuses 0 x 2**32 x 2**32
        raise ValueError(f"{path} is too large: {says} bytes, more than max_bytes={max_bytes}")
    array = np.empty(count, np.uint8)  # takes no physical memory before it is written
    size = _read_into(array, content)
    if size < count:
        raise ValueError(f"{path} has {size} bytes of data, but {says}")
    if content.read(1):  # at the end gzip compares the checksum
        raise ValueError(f"{path} has more than {size} bytes of data, but {says}")
    return array.reshape(shape)


def _read_into(array: np.ndarray, content: BufferedIOBase) -> int:
    """Fills an array of bytes from a file, piece by piece; returns the number of bytes read."""
    view, done = array.data, 0
    while size := content.readinto(view[done : done + _PIECE]):
        done += size
    return done
