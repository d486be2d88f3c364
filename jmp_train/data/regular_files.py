"""Opens data files, with errors that name the file if it is a pipe or a device, or if memory runs out."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path


@contextmanager
def open_regular(path: Path | str) -> Iterator[BufferedReader]:
    """Opens a regular file for reading bytes.

    A pipe may never have a writer and a device may never end, so neither is opened.

    Args:
      path: the file, or a symbolic link to it.

    Yields:
      The open file.

    Raises:
      OSError: the file is missing, cannot be read, or is a folder, a pipe, a socket or a device.
      MemoryError: the code within the `with` ran out of memory; the message names the file.

    Example:
      >>> import tempfile
      >>> file = Path(tempfile.mkdtemp()) / "two_bytes"
      >>> _ = file.write_bytes(b"ab")
      >>> with open_regular(file) as opened:
      ...     opened.read()
      b'ab'
      >>> with open_regular("/dev/null"):
      ...     pass
      Traceback (most recent call last):
      OSError: /dev/null is not a regular file
    """
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise OSError(f"{path} is not a regular file")
    with open(path, "rb") as file:
        try:
            yield file
        except MemoryError as error:
            raise MemoryError(f"{path} needs more memory than is available") from error


def read_bytes(path: Path, *, max_bytes: int = 2**30) -> bytes:
    """Reads a regular file.

    Args:
      path: the file.
      max_bytes: the largest size to read.

    Raises:
      ValueError: the file is larger than `max_bytes`; the message names it.
      OSError: see `open_regular`.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
        if len(content) > max_bytes:
            raise ValueError(f"{path} is too large: it has more than max_bytes={max_bytes}")
        return content
