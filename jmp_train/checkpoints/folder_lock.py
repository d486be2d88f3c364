"""The lock on a folder of checkpoints: only one store saves there at a time."""

import os
import socket
import warnings
from pathlib import Path

from jmp_train.checkpoints.file_locks import (
    FileLock,
    Holder,
    LockHeldError,
    LockUnsupportedError,
    take_lock,
)

_FILE = "lock"


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
        return take_lock(directory / _FILE)
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
