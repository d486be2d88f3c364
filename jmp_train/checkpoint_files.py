"""A checkpoint's folder: written beside its place and renamed, with a manifest of what is in every file.

It is called `step_00000100`, and holds `arrays`, an orbax checkpoint with a folder for each leaf, `manifest.json`
with the leaves and with size and sha256 of every file, and `manifest.sha256` of that.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jmp_train.checkpoint_manifest import LONGEST, MANIFEST, MANIFEST_SUM, file_facts
from jmp_train.whole_files import sync

_STEP = re.compile(r"step_(\d{8,})")


def step_folder(directory: Path, step: int) -> Path:
    """Returns where a step is, or will be."""
    return directory / f"step_{step:08d}"


def saved_steps(directory: Path) -> list[int]:
    """Returns the steps that are there whole, damaged or not, in ascending order."""
    found = (_STEP.fullmatch(path.name) for path in directory.iterdir())
    return sorted(int(match[1]) for match in found if match)


def commit(folder: Path, manifest: dict[str, Any], write: Callable[[Path], None]) -> None:
    """Writes a folder beside its place, with a manifest, and renames it.

    Args:
      folder: the place; what is there is replaced.
      manifest: what else the manifest is to say, as JSON; this adds `files`.
      write: writes the folder's other contents into what it is given.
    """
    beside = folder.with_name(f"{folder.name}.tmp")
    remove(beside)
    beside.mkdir()
    try:
        write(beside)
        files = {path.relative_to(beside).as_posix(): file_facts(path) for path in _files(beside)}
        text = json.dumps({**manifest, "files": files}, indent=1).encode()
        if len(text) > LONGEST:
            raise ValueError(f"the manifest has {len(text)} bytes, and at most {LONGEST} are read")
        (beside / MANIFEST).write_bytes(text)
        (beside / MANIFEST_SUM).write_text(hashlib.sha256(text).hexdigest())
        for path in (*_files(beside), *(p for p in beside.rglob("*") if p.is_dir()), beside):
            sync(path)
        remove(folder)
        beside.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        raise


def remove(folder: Path) -> None:
    """Removes a folder, if it is there, in a way that never leaves half of it under its name."""
    if not folder.exists():
        return
    doomed = folder.with_name(f"{folder.name}.deleted")
    shutil.rmtree(doomed, ignore_errors=True)
    folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(directory: Path) -> None:
    """Removes what a process that was killed was about to write or to delete."""
    for path in directory.iterdir():
        if path.suffix in {".tmp", ".deleted"} and _STEP.fullmatch(path.stem):
            shutil.rmtree(path, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
