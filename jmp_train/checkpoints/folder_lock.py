"""The lock of a checkpoint folder: one store saves there at a time, and its process is named in the lock's file.

The lock is `flock`'s: the kernel releases it when the process ends, however it ends, so a free lock has no living
holder. It holds between the processes of a machine, between two holders in one process, and between machines if the
file system supports that (NFS does, on Linux). Some file systems (Lustre mounted without it, NFS without a lock daemon)
and systems without `flock` (Windows) have no such locks.
"""

import contextlib
import errno
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from jmp_train.policies.files import printable, read_plain

if sys.platform != "win32":
    import fcntl

_LARGEST = 2**16  # bytes of the file
_LONGEST = 120  # characters of a command line in it

# The descriptors of this process's locks. A forked child closes them; otherwise the lock would outlive its holder.
_descriptors: set[int] = set()


def lock_folder(directory: Path) -> Callable[[], None] | None:
    """Takes the lock on a folder, which is created if needed, and writes this process's name into its file `lock`.

    Args:
      directory: the folder.

    Returns:
      A function that releases the lock and deletes its file; it does nothing the second time, or in a forked child.
      None, with a warning, if there are no locks.

    Raises:
      OSError: another store, of this or another process, has the lock; the message names it. Or the folder cannot be
        written to.
    """
    path = directory / "lock"
    while True:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        except OSError as error:
            reason = f"no checkpoint can be written: {error.strerror}"
            raise OSError(error.errno, reason, str(directory)) from None
        _descriptors.add(descriptor)
        try:
            _flock(descriptor)
        except OSError as error:
            is_new = os.fstat(descriptor).st_size == 0
            _close(descriptor)
            if error.errno in (errno.EAGAIN, errno.EACCES):  # the second on some file systems
                raise OSError(f"{directory} is in use: {_holder(path)}") from None
            if is_new:
                path.unlink(missing_ok=True)
            warnings.warn(
                f"{directory} cannot be locked, so another run that saves there will not be detected: "
                f"this file system has no locks: {error.strerror}",
                stacklevel=4,  # the caller of the store's method that called this
            )
            return None
        if _is_at(descriptor, path):
            break
        _close(descriptor)  # its holder deleted it after it was opened here
    since = datetime.now(UTC).replace(tzinfo=None).isoformat(" ", "seconds")
    command = " ".join(shlex.join(sys.orig_argv).split())[:_LONGEST]
    with contextlib.suppress(OSError):  # the name is for messages only
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{_this_process()} since {since} UTC ({command})\n".encode(errors="replace"), 0)
    return lambda: _release(path, descriptor)


def _flock(descriptor: int) -> None:
    if sys.platform == "win32":
        raise OSError(errno.ENOSYS, "Windows releases none when its process ends")
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def _holder(path: Path) -> str:
    """Returns what an error says of the process that has the lock."""
    name = ""
    with contextlib.suppress(OSError, ValueError):
        name = printable(read_plain(path, max_bytes=_LARGEST).decode(errors="replace"))
    if name.startswith(f"{_this_process()} "):
        return "another CheckpointStore of this process saves there; close it first"
    return f"{name if name.startswith('process ') else 'another process'} saves there"


def _release(path: Path, descriptor: int) -> None:
    if descriptor not in _descriptors:
        return
    with contextlib.suppress(OSError):  # for example if the folder was deleted
        if _is_at(descriptor, path):  # if it was deleted and made again, the file there is another holder's
            path.unlink()  # before another process can take it: `lock_folder` notices that it took a deleted file
    _close(descriptor)


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    # Closing releases the lock: forked children have closed theirs, and so does exec.
    os.close(descriptor)


def _close_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
