"""Temporary folders that a killed writer of checkpoints leaves behind, and the next writer deletes."""

import contextlib
import re
import shutil
from pathlib import Path

from jmp_train.checkpoints.files import (
    BEING_DELETED,
    BEING_WRITTEN,
    COMPLETE,
    STEP,
    WRITER,
    saved_folders,
    step_folder,
)
from jmp_train.checkpoints.manifest import DamagedError, read_manifest
from jmp_train.policies.files import sync

_LEFTOVER = re.compile(  # without a writer's name, those of earlier versions
    rf"{STEP}(\.{WRITER})?\.({BEING_WRITTEN}|{COMPLETE}|{BEING_DELETED})"
)


def clear_leftovers(directory: Path) -> None:
    """Removes what writers that are dead left, but puts what was to replace a step, and is intact, there.

    Args:
      directory: the steps' folder, on which the caller has the lock: every other writer is dead. What cannot be
        removed, as another user's, stays.
    """
    for path in sorted(directory.iterdir()):
        if match := _LEFTOVER.fullmatch(path.name):
            with contextlib.suppress(OSError):
                _clear(path, int(match["step"]))


def _clear(leftover: Path, step: int) -> None:
    folder, doomed = step_folder(leftover.parent, step), leftover
    is_complete = leftover in saved_folders(leftover.parent).get(step, ())
    if is_complete and not _is_intact(folder) and _is_intact(leftover):
        doomed = leftover.with_suffix(f".{BEING_DELETED}")
        if folder.exists():
            folder.rename(doomed)
        leftover.rename(folder)
        sync(folder.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def _is_intact(folder: Path) -> bool:
    try:
        read_manifest(folder)
    except DamagedError:
        return False
    return True
