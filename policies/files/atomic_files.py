"""Atomic writes, which leave a file with either its whole new content or its old one; and the folder for caches."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jmp_train.policies.files.plain_files import faults_named

_LONGEST = 220  # bytes of the part of a name that its temporary file has too; most file systems allow 255


def write_atomically(path: Path, content: bytes | Iterable[Any]) -> Path:
    """Writes a file atomically: writes a temporary file in the same folder, then renames it.

    A process that is killed meanwhile leaves the temporary file, whose name begins with a dot.

    Args:
      path: the file, in an existing folder. An existing file is replaced; who has it open reads on in the old one.
      content: the whole content, or its parts, which are bytes or arrays of bytes.

    Returns:
      The path.
    """
    name = os.fsdecode(os.fsencode(path.name)[:_LONGEST])
    temporary = path.with_name(f".{name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with faults_named(path), temporary.open("xb") as file:
            size = sum(file.write(part) for part in ([content] if isinstance(content, bytes) else content))
            file.flush()
            os.fsync(file.fileno())  # before the rename, which may reach the disk first
        if (found := temporary.stat().st_size) != size:
            raise OSError(errno.EIO, f"has {found} bytes instead of {size}", str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not all systems sync folders; the file is whole anyway
        sync(path.parent)
    return path


def sync(path: Path) -> None:
    """Flushes writes to a file, or renames in a folder, to the disk.

    Args:
      path: path of the file or folder.
    """
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def cache_folder() -> Path:
    """Returns the folder for caches: `$JMP_TRAIN_CACHE`, or jmp_train in `$XDG_CACHE_HOME` or ~/.cache.

    Example:
      >>> os.environ["JMP_TRAIN_CACHE"] = "/scratch/jmp_train"
      >>> str(cache_folder())
      '/scratch/jmp_train'
      >>> del os.environ["JMP_TRAIN_CACHE"]
    """
    if own := os.environ.get("JMP_TRAIN_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jmp_train"
