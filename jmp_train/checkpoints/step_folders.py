"""A checkpoint's folder: written atomically, with a manifest of every file.

The folder `step_00000100` holds `arrays`, an orbax checkpoint with a folder for each leaf, `manifest.json` with the
leaves and with size and sha256 of every file, and `manifest.sha256` with the manifest's own sum. Folders in transition
have their writer's name too: `step_00000100.WRITER.tmp` is being written, `step_00000100.WRITER.whole` is about to
replace the step, and `step_00000100.WRITER.deleted` is being deleted. At every moment of a replacement, the step or
its replacement has a name that readers look for.
"""

import contextlib
import hashlib
import json
import operator
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsIndex

from jmp_train.checkpoints.file_locks import is_read
from jmp_train.checkpoints.leaves import shown
from jmp_train.checkpoints.manifest import (
    LONGEST,
    MANIFEST,
    MANIFEST_SUM,
    file_facts,
    read_manifest,
    verified_manifest,
)
from jmp_train.policies.files import DamagedError, sync

COMPLETE, BEING_WRITTEN, BEING_DELETED = "whole", "tmp", "deleted"
STEP = r"step_(?P<step>[0-9]{8}|[1-9][0-9]{8,})"
WRITER = r"[A-Za-z0-9-]+"

_COMPLETE = re.compile(rf"{STEP}(\.{WRITER}\.{COMPLETE})?")
_OLD_TEMPORARY = re.compile(rf"{STEP}\.{BEING_WRITTEN}")  # the name in earlier versions


def checked_step(step: SupportsIndex) -> int:
    """Returns a step's number; raises TypeError or ValueError if it is none."""
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step={shown(step)} must be a whole number") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"step={shown(step)} must be at least 0 and below 2**63")
    return number


def step_folder(directory: Path, step: int) -> Path:
    """Returns the folder of a step, which may not exist yet."""
    return directory / f"step_{step:08d}"


def saved_folders(directory: Path) -> dict[int, list[Path]]:
    """Returns the complete steps, damaged or not, in ascending order, with the folders of each.

    The first folder is the step's own; others are replacements that a killed writer had completed. The result is empty
    if the directory does not exist.
    """
    found: dict[int, list[Path]] = {}
    for name in sorted(_names_in(directory)):
        match = _COMPLETE.fullmatch(name) or _OLD_TEMPORARY.fullmatch(name)
        if match and (match.re is _COMPLETE or os.path.exists(directory / name / MANIFEST_SUM)):
            found.setdefault(int(match["step"]), []).append(directory / name)
    return dict(sorted(found.items()))


def _names_in(directory: Path) -> set[str]:
    """Returns the names in a directory; nothing if it does not exist.

    A listing may miss a file that is renamed meanwhile under both of its names, so two listings must agree.
    """
    try:
        names = set(os.listdir(directory))
        while names != (again := set(os.listdir(directory))):
            names = again
    except FileNotFoundError:
        return set()
    return names


def writer_name() -> str:
    """Returns a unique name for this process as a writer: the host's name, the process id and random digits."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def commit(folder: Path, writer: str, manifest: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Writes a folder atomically: writes a temporary one with a manifest, and renames it once all is on the disk.

    Args:
      folder: the destination, which is replaced if it exists.
      writer: a unique name, also used for the temporary folder.
      manifest: further entries of the manifest, as JSON; this function adds `files`.
      write: writes the folder's other contents, given the temporary folder.

    Raises:
      OSError: it could not be written, or a part of it is missing. The old folder is still there.
      DamagedError: a leaf has no files.
    """
    temporary = _renamed(folder, writer, BEING_WRITTEN)
    try:
        temporary.mkdir()
        write(temporary)
        files = {path.relative_to(temporary).as_posix(): file_facts(path) for path in _files(temporary)}
        text = json.dumps({**manifest, "files": files}, indent=1).encode()
        if len(text) > LONGEST:
            raise ValueError(f"the manifest has {len(text)} bytes, and at most {LONGEST} are read")
        (temporary / MANIFEST).write_bytes(text)
        (temporary / MANIFEST_SUM).write_text(hashlib.sha256(text).hexdigest())
        for path in (
            *_files(temporary),
            *(p for p in temporary.rglob("*") if p.is_dir()),
            temporary,
        ):
            sync(path)
        verified_manifest(temporary)  # names the files of every leaf
        _check_sizes(temporary, files)
        if folder.exists():
            _replace(folder, temporary, writer)
        else:
            temporary.rename(folder)
        sync(folder.parent)
        _check_sizes(folder, files)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def _replace(folder: Path, new: Path, writer: str) -> None:
    """Replaces a folder by another, so that one of them exists whenever the process is killed."""
    whole, old = _renamed(folder, writer, COMPLETE), _renamed(folder, writer, BEING_DELETED)
    new.rename(whole)  # a name that readers look for
    try:
        sync(folder.parent)
        folder.rename(old)
        whole.rename(folder)
        sync(folder.parent)
    finally:
        if folder.exists():  # otherwise the renamed folder is the step
            shutil.rmtree(whole, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path, writer: str) -> None:
    """Removes a step, unless it is being read, in a way that never leaves half of it under its name."""
    if is_read(folder):
        return
    doomed = _renamed(folder, writer, BEING_DELETED)
    with contextlib.suppress(FileNotFoundError):  # already removed
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)


def _renamed(folder: Path, writer: str, kind: str) -> Path:
    return folder.with_name(f"{folder.name}.{writer}.{kind}")


def _check_sizes(folder: Path, files: dict[str, Any]) -> None:
    for name, facts in files.items():
        found = (folder / name).stat().st_size
        if not found or found != facts["bytes"]:
            raise OSError(f"{folder / name} has {found} bytes, and had {facts['bytes']}")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


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
