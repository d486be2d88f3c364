"""Locks on files: one holder at a time, whose name is in the file, released when the holder ends.

The lock is `flock`'s: the kernel releases it when the process ends, however it ends, so a free lock has no living
holder. It holds between the processes of a machine, between two holders in one process, and between machines if the
file system supports that (NFS does, on Linux). File systems without such locks (some mounts of Lustre, NFS without a
lock daemon) and systems without `flock` (Windows) raise an error of their own, so that the caller decides what to do.
"""

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

from jmp_train.policies.files import parse_json, read_plain

if sys.platform != "win32":
    import fcntl

_NOT_SUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
# Opened as a folder, so that a pipe in its place does not block.
_FOLDER = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_DIRECTORY", 0)
_LARGEST = 2**16  # bytes of the file
_LONGEST = 200  # characters of a command line in the file

# The descriptors of this process's locks. A forked child closes them; otherwise the lock would outlive its holder.
_descriptors: set[int] = set()


class Holder(NamedTuple):
    """The holder of a lock.

    Attributes:
      host: the machine's name.
      process: the process id.
      since: when the process took the lock, in UTC.
      command: its command line, truncated after 200 characters.
    """

    host: str
    process: int
    since: str
    command: str

    def __str__(self) -> str:
        """Returns a description for use in a sentence."""
        return f"process {self.process} on {self.host} since {self.since} UTC ({self.command})"


class LockHeldError(OSError):
    """A lock is held by another.

    Attributes:
      path: the lock's file.
      holder: the holder; None if the file does not name one, as at the moment when it is taken.
    """

    def __init__(self, path: Path, holder: Holder | None) -> None:
        super().__init__(f"{path} is held by {holder or 'another process'}")
        self.path = path
        self.holder = holder


class LockUnsupportedError(OSError):
    """The file system or operating system has no locks that end with their holder."""


class FileLock:
    """A held lock; it ends with `release`, the `with` block, or the process.

    Attributes:
      path: its file, which `release` deletes.
    """

    def __init__(self, path: Path, descriptor: int) -> None:
        self.path = path
        self._descriptor = descriptor

    def __enter__(self) -> Self:
        """Returns the lock."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Releases it."""
        self.release()

    def release(self) -> None:
        """Deletes the file and releases the lock; does nothing the second time, or in a forked child."""
        if self._descriptor not in _descriptors:
            return
        with contextlib.suppress(OSError):  # for example if the folder was deleted
            self.path.unlink()  # before another process can take it: `take_lock` notices that it took a deleted file
        descriptor, self._descriptor = self._descriptor, -1
        _close(descriptor)


def take_lock(path: Path) -> FileLock:
    """Takes the lock on a file without waiting, and writes the holder into the file as one line of JSON.

    Args:
      path: the lock's file, in a folder that exists. It is created if needed; the file of a dead process is reused.

    Raises:
      LockHeldError: a living process, possibly this one, holds the lock; `holder` names it.
      LockUnsupportedError: there are no locks here.
      OSError: the file cannot be opened for writing.

    Example:
      >>> import tempfile
      >>> with tempfile.TemporaryDirectory() as directory, take_lock(Path(directory) / "lock") as lock:
      ...     read_holder(lock.path).process == os.getpid()
      True
    """
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
        _descriptors.add(descriptor)
        try:
            if not _try_flock(descriptor):
                raise LockHeldError(path, read_holder(path))
            if _is_at(descriptor, path):  # otherwise its holder deleted it after it was opened here
                line = json.dumps(_this_process()._asdict()) + "\n"
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, line.encode(), 0)
                return FileLock(path, descriptor)
        except LockUnsupportedError:
            if os.fstat(descriptor).st_size == 0:  # created above
                path.unlink()
            _close(descriptor)
            raise
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)


def read_holder(path: Path) -> Holder | None:
    """Returns the process that took the lock last, living or dead; None if the file does not name one.

    Args:
      path: the lock's file.
    """
    try:
        found = parse_json(path, read_plain(path, max_bytes=_LARGEST))
        host, since, command = (_one_line(str(found[key])) for key in ("host", "since", "command"))
        return Holder(host, int(found["process"]), since, command)
    except (OSError, ValueError, TypeError, KeyError):
        return None


@contextmanager
def reading(folder: Path) -> Iterator[Callable[[], bool]]:
    """Marks a folder as being read, and yields a function that returns whether the path still leads to it.

    It writes nothing, so the folder may be read-only. On systems without locks, there is no mark.

    Args:
      folder: the path.
    """
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError as error:
        is_missing = isinstance(error, FileNotFoundError)
        yield lambda: not is_missing
        return
    _descriptors.add(descriptor)
    try:
        if sys.platform != "win32":
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield lambda: _is_at(descriptor, folder)
    finally:
        _close(descriptor)


def is_read(folder: Path) -> bool:
    """Returns whether a folder is marked as being read, as far as this machine knows.

    Args:
      folder: the path.
    """
    if sys.platform == "win32":
        return False
    try:
        descriptor = os.open(folder, _FOLDER)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return isinstance(error, BlockingIOError)
    finally:
        os.close(descriptor)
    return False


def _try_flock(descriptor: int) -> bool:
    """Returns whether the lock could be taken; raises LockUnsupportedError if there are no locks."""
    if sys.platform == "win32":
        raise LockUnsupportedError("Windows has no file locks that are released when their process ends")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EACCES:  # on some file systems
            return False
        if error.errno in _NOT_SUPPORTED:
            raise LockUnsupportedError(f"this file system has no locks: {error.strerror}") from None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether a path still names an open file."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _this_process() -> Holder:
    now = datetime.now(UTC).replace(tzinfo=None).isoformat(" ", "seconds")
    command = _one_line(shlex.join(sys.orig_argv))
    return Holder(socket.gethostname(), os.getpid(), now, command)


def _one_line(text: str) -> str:
    printable = "".join(c if c.isprintable() else " " for c in text)
    line = " ".join(printable.split())
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."


def _close(descriptor: int) -> None:
    _descriptors.discard(descriptor)
    # Closing releases the lock: forked children have closed theirs, and so does exec.
    os.close(descriptor)


def _close_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)


def lock_folder(directory: Path) -> FileLock | None:
    """Takes the lock on a folder, which is created if needed; returns None, with a warning, if there are no locks.

    The kernel releases it when the process ends, however it ends, so the file of a killed process is reused.

    Args:
      directory: the folder.

    Raises:
      OSError: another store, of this or another process, has the lock; the message names it. Or the folder cannot be
        written to.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        return take_lock(directory / "lock")
    except LockHeldError as error:
        raise OSError(f"{directory} is in use: {_who(error.holder)}") from None
    except LockUnsupportedError as error:
        warnings.warn(
            f"{directory} cannot be locked, so another run that saves there will not be detected: {error}",
            stacklevel=4,  # the caller of the store's method that called this
        )
        return None
    except OSError as error:
        reason = f"no checkpoint can be written: {error.strerror}"
        raise OSError(error.errno, reason, str(directory)) from None


def _who(holder: Holder | None) -> str:
    if holder is not None and (holder.host, holder.process) == (socket.gethostname(), os.getpid()):
        return "another CheckpointStore of this process saves there; close it first"
    return f"{holder or 'another process'} saves there"
