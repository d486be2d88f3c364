"""A checkpoint's folder: written atomically, with a manifest of what is in every file.

It is called `step_00000100`, and holds `arrays`, an orbax checkpoint with a folder for each leaf, `manifest.json`
with the leaves and with size and sha256 of every file, and `manifest.sha256` of that. What is being written or deleted
has its writer's name in addition: `step_00000100.WRITER.tmp` is being written, `step_00000100.WRITER.whole` is about to
replace the step, and `step_00000100.WRITER.deleted` is being deleted. At every moment of a replacement the step, or
what is to replace it, is there under a name that readers look for.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jmp_train.checkpoints.file_locks import is_read
from jmp_train.checkpoints.manifest import (
    LONGEST,
    MANIFEST,
    MANIFEST_SUM,
    file_facts,
    verified_manifest,
)
from jmp_train.policies.files import sync

COMPLETE, BEING_WRITTEN, BEING_DELETED = "whole", "tmp", "deleted"
STEP = r"step_(?P<step>[0-9]{8}|[1-9][0-9]{8,})"
WRITER = r"[A-Za-z0-9-]+"

_COMPLETE = re.compile(rf"{STEP}(\.{WRITER}\.{COMPLETE})?")
_OLD_TEMPORARY = re.compile(rf"{STEP}\.{BEING_WRITTEN}")  # as earlier versions named it


def step_folder(directory: Path, step: int) -> Path:
    """Returns where a step is, or will be."""
    return directory / f"step_{step:08d}"


def saved_folders(directory: Path) -> dict[int, list[Path]]:
    """Returns the steps that are there complete, damaged or not, in ascending order, and the folders of each.

    The first is the step's own; others are what a writer that was killed was about to put there. The result is empty if
    the directory does not exist.
    """
    found: dict[int, list[Path]] = {}
    for name in sorted(_names_in(directory)):
        match = _COMPLETE.fullmatch(name) or _OLD_TEMPORARY.fullmatch(name)
        if match and (match.re is _COMPLETE or os.path.exists(directory / name / MANIFEST_SUM)):
            found.setdefault(int(match["step"]), []).append(directory / name)
    return dict(sorted(found.items()))


def _names_in(directory: Path) -> set[str]:
    """Returns what is in a directory; nothing if it is not there.

    A listing may miss a file that is renamed meanwhile under both of its names, so two have to agree.
    """
    try:
        names = set(os.listdir(directory))
        while names != (again := set(os.listdir(directory))):
            names = again
    except FileNotFoundError:
        return set()
    return names


def writer_name() -> str:
    """Returns a name for what this process is about to write: the host's name, the process id and random digits."""
    host = re.sub(r"[^A-Za-z0-9]", "-", socket.gethostname())[:40]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def commit(folder: Path, writer: str, manifest: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Writes a folder atomically: to a temporary one, with a manifest, which is renamed once all is on the disk.

    Args:
      folder: the place; what is there is replaced.
      writer: the name that the temporary folder has, too; nobody else's.
      manifest: what else the manifest is to say, as JSON; this adds `files`.
      write: writes the folder's other contents into what it is given.

    Raises:
      OSError: it could not be written, or something of it is missing. What was at its place is there still.
      DamagedError: of a leaf there are no files.
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
        verified_manifest(temporary)  # which names the files of every leaf
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
    """Puts a folder at another's place, so that one of them is there whenever the process is killed."""
    whole, old = _renamed(folder, writer, COMPLETE), _renamed(folder, writer, BEING_DELETED)
    new.rename(whole)  # which readers look for
    try:
        sync(folder.parent)
        folder.rename(old)
        whole.rename(folder)
        sync(folder.parent)
    finally:
        if folder.exists():  # else what is whole is the step
            shutil.rmtree(whole, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)


def remove(folder: Path, writer: str) -> None:
    """Removes a step in a way that never leaves half of it under its name; not one that is being read."""
    if is_read(folder):
        return
    doomed = _renamed(folder, writer, BEING_DELETED)
    with contextlib.suppress(FileNotFoundError):  # it is gone
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
