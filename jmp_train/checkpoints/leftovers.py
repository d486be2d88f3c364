"""Temporary folders that a killed writer of checkpoints left behind, and that the next writer deletes."""

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

_LEFTOVER = re.compile(  # earlier versions have no writer's name
    rf"{STEP}(\.{WRITER})?\.({BEING_WRITTEN}|{COMPLETE}|{BEING_DELETED})"
)


def clear_leftovers(directory: Path) -> None:
    """Removes the folders of dead writers, but completes an interrupted replacement of a step if it is intact.

    Args:
      directory: the steps' folder. The caller has its lock, so every other writer is dead. Folders that cannot be
        removed, such as another user's, stay.
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
