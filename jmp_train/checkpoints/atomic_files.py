"""Files that are there whole or not at all."""

import contextlib
import os
from pathlib import Path


def write_whole(path: Path, content: bytes) -> Path:
    """Writes a file beside and renames it, so that no half file is ever there, nor after a crash.

    A process that is killed meanwhile leaves the file beside, whose name begins with a dot.

    Args:
      path: where to; its folder exists. A file that is there is replaced.
      content: all of it.

    Returns:
      The path.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(content)
        sync(beside)  # before the rename, which may reach the disk first
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not all systems sync folders; the file is whole anyway
        sync(path.parent)
    return path


def sync(path: Path) -> None:
    """Has what was written to a file, or renamed in a folder, reach the disk.

    Args:
      path: of the file or the folder.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
