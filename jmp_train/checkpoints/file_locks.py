"""Locks on files: one holder at a time, whose name is in the file, and none after its death.

The lock is `flock`'s: the kernel gives it back when the process that holds it ends, however it ends, so a lock that can
be taken has no living holder. It holds between the processes of a machine, between two holders in one process, and
between machines where the file system says so (NFS does, on Linux). A file system that has no such locks (some mounts
of Lustre, NFS without a lock daemon), or a system without `flock` (Windows), is an error of its own, so that the caller
decides what to do without one.
"""

import contextlib
import errno
import json
import os
import shlex
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple, Self

if sys.platform != "win32":
    import fcntl

_NOT_SUPPORTED = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL}
# As a folder, so that a pipe in its place is not waited for.
_FOLDER = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_DIRECTORY", 0)
_LONGEST = 200  # characters of a command line that are written

# The descriptors of this process's locks, which a forked child closes: the lock would outlive its holder in it.
_descriptors: set[int] = set()


class Holder(NamedTuple):
    """Who holds a lock.

    Attributes:
      host: the machine's name.
      process: the process id.
      since: when it took the lock, in UTC.
      command: its command line, truncated after 200 characters.
    """

    host: str
    process: int
    since: str
    command: str

    def __str__(self) -> str:
        """Returns it as a part of a sentence."""
        return f"process {self.process} on {self.host} since {self.since} UTC ({self.command})"


class LockHeldError(OSError):
    """A lock is held by another.

    Attributes:
      path: the lock's file.
      holder: who holds it; None if the file does not say, as in the moment in which it is taken.
    """

    def __init__(self, path: Path, holder: Holder | None) -> None:
        super().__init__(f"{path} is held by {holder or 'another process'}")
        self.path = path
        self.holder = holder


class LockUnsupportedError(OSError):
    """The file system, or the operating system, has no locks that end with their holder."""


class FileLock:
    """A lock that is held; it ends with `release`, the `with` block, or the process.

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
        """Deletes the file and gives the lock back; nothing if that was done, or in a forked child."""
        if self._descriptor not in _descriptors:
            return
        with contextlib.suppress(OSError):  # as in a folder that is gone
            self.path.unlink()  # before another can take it: `take_lock` sees that it took a deleted file
        descriptor, self._descriptor = self._descriptor, -1
        _close(descriptor)


def take_lock(path: Path) -> FileLock:
    """Takes the lock on a file without waiting, and writes the holder into it, as one line of JSON.

    Args:
      path: the lock's file, in a folder that exists. It is made if it is not there; one that a dead process left behind
        is taken over.

    Raises:
      LockHeldError: a living process, this one included, holds it; `holder` says which.
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
            if _is_at(descriptor, path):  # else its holder deleted it after we had opened it
                line = json.dumps(_this_process()._asdict()) + "\n"
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, line.encode(), 0)
                return FileLock(path, descriptor)
        except LockUnsupportedError:
            if os.fstat(descriptor).st_size == 0:  # made above
                path.unlink()
            _close(descriptor)
            raise
        except BaseException:
            _close(descriptor)
            raise
        _close(descriptor)


def read_holder(path: Path) -> Holder | None:
    """Returns who took the lock last, whether it lives or not; None if the file does not say.

    Args:
      path: the lock's file.
    """
    try:
        found = json.loads(path.read_text())
        host, since, command = (_one_line(str(found[key])) for key in ("host", "since", "command"))
        return Holder(host, int(found["process"]), since, command)
    except (OSError, ValueError, TypeError, KeyError):
        return None


@contextmanager
def reading(folder: Path) -> Iterator[Callable[[], bool]]:
    """Marks a folder as being read, and yields a function that tells whether the path still leads to it.

    Writes nothing, so the folder may be read-only. Where there are no locks, there is no mark.

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
    """Returns whether the lock could be taken; raises LockUnsupportedError if there are none here."""
    if sys.platform == "win32":
        raise LockUnsupportedError("there are no file locks on Windows that end with their holder")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno == errno.EACCES:  # what some file systems say instead
            return False
        if error.errno in _NOT_SUPPORTED:
            raise LockUnsupportedError(f"this file system has no locks: {error.strerror}") from None
        raise
    return True


def _is_at(descriptor: int, path: Path) -> bool:
    """Returns whether an open file is still what a path names."""
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
    # Which gives the lock back: forked children have closed theirs, and exec closes it.
    os.close(descriptor)


def _close_in_child() -> None:
    while _descriptors:
        os.close(_descriptors.pop())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
