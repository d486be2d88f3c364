"""IDX, the file format of MNIST: big-endian arrays behind a magic number, gzipped or not."""

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

_UNSIGNED_BYTES = 0x08  # the third byte of the magic number; the fourth is the number of axes
_GZIP = b"\x1f\x8b"


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Reads an IDX file of unsigned bytes.

    Args:
      path: the file, gzipped or not; its content tells, not its name.
      axes: how many axes the array must have: 3 for images, 1 for labels.

    Returns:
      A uint8 array.

    Raises:
      ValueError: the file is no such IDX file, or incomplete; the message names it and the fault.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "labels"
      >>> _ = file.write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 7, 5]))
      >>> read_idx(file, axes=1)
      array([7, 5], dtype=uint8)

    Reference: http://yann.lecun.com/exdb/mnist (the format's description).
    """
    content = path.read_bytes()
    if content.startswith(_GZIP):
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{path} is a damaged or truncated gzip file: {error}") from None
    magic, wanted = content[:4], bytes([0, 0, _UNSIGNED_BYTES, axes])
    if magic != wanted:
        raise ValueError(
            f"{path} has the magic number 0x{magic.hex()}, where IDX bytes with {axes} "
            f"{'axis' if axes == 1 else 'axes'} have 0x{wanted.hex()}"
        )
    header = 4 + 4 * axes
    if len(content) < header:
        raise ValueError(f"{path} ends within its header, after {len(content)} bytes")
    shape = [int(n) for n in np.frombuffer(content, ">u4", axes, offset=4)]
    if len(content) - header != math.prod(shape):
        raise ValueError(
            f"{path} has {len(content) - header} bytes of data, "
            f"where its header says {' x '.join(map(str, shape))}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)
