"""Checkpoint manifests: their schema, and the verification of files against them.

The sums in a manifest reveal damage, but whoever can write into the folder can forge them. So every name, size and
shape is checked before it is used: only plain files in the checkpoint's own folder are read, and they take no more
memory than the requested state.
"""

import contextlib
import hashlib
import math
import os
import re
import stat
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any

from jmp_train.checkpoints.leaves import MOST_AXES, STORED, is_count, shown
from jmp_train.policies.files import DamagedError, open_plain, parse_json

MANIFEST, MANIFEST_SUM = "manifest.json", "manifest.sha256"
FORMAT = 1
LONGEST = 2**26  # bytes of a manifest; a leaf takes about 600 of them

_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMPONENT = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9_.\-]+")  # of a path below the checkpoint's folder


def verified_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest, after checking its sum and the validity of every entry.

    Args:
      folder: the folder of the step; its name begins with the step's number.

    Raises:
      DamagedError: the manifest is missing or changed, or has a format that this version does not write.
    """
    if not stat.S_ISDIR(_mode(folder)):
        raise DamagedError(f"{folder} is not a folder")
    text = _read(folder, MANIFEST)
    if hashlib.sha256(text).hexdigest().encode() != _read(folder, MANIFEST_SUM):
        raise DamagedError(f"{folder / MANIFEST} or {MANIFEST_SUM} is not as it was written")
    manifest = parse_json(folder / MANIFEST, text)
    if wrong := _what_is_wrong(manifest, folder.name):
        raise DamagedError(f"{folder / MANIFEST} {wrong}")
    return manifest


def read_manifest(folder: Path) -> dict[str, Any]:
    """Returns the manifest as `verified_manifest` does, after checking every file against it.

    Raises:
      DamagedError: something is missing, or is not as it was written.
    """
    manifest = verified_manifest(folder)
    for name, facts in manifest["files"].items():
        _check_file(folder, name, facts)
    return manifest


def file_facts(path: Path) -> dict[str, Any]:
    """Returns a file's size and sha256, as in a manifest."""
    with path.open("rb") as file:
        return _facts(file)


def _what_is_wrong(manifest: object, folder_name: str) -> str:
    """Returns a short description of the first invalid entry; an empty string if there is none."""
    if not isinstance(manifest, dict):
        return "is not a JSON object"
    if not is_count(manifest.get("format")) or manifest["format"] != FORMAT:
        return f"has format {shown(manifest.get('format'))}, this version of jmp_train reads {FORMAT}"
    step, leaves, files = (manifest.get(key) for key in ("step", "leaves", "files"))
    if not is_count(step) or f"step_{step:08d}" != folder_name.partition(".")[0]:
        return f"is of step {shown(step)}"
    if not isinstance(files, dict) or not isinstance(leaves, list):
        return "has no list of leaves or no files"
    if not isinstance(manifest.get("metadata", {}), dict):
        return f"has metadata {shown(manifest['metadata'])}"
    for name, facts in files.items():
        if not all(_COMPONENT.fullmatch(part) for part in name.split("/")):
            return f"names a file {shown(name)}, which is not one of a checkpoint"
        if not isinstance(facts, dict) or not is_count(facts.get("bytes")):
            return f"does not say how long {shown(name)} is"
        if not _is_sha256(facts.get("sha256")):
            return f"does not say the sha256 of {shown(name)}"
    for number, leaf in enumerate(leaves):
        if wrong := _what_is_wrong_with_leaf(leaf, files):
            return f"says of leaf {number} {wrong}"
    for key in ("path", "folder"):
        if len({leaf[key] for leaf in leaves}) < len(leaves):
            return f"has two leaves of the same {key}"
    return ""


def _what_is_wrong_with_leaf(leaf: object, files: dict[str, Any]) -> str:
    if not isinstance(leaf, dict):
        return shown(leaf)
    for key, is_valid in _VALID.items():
        if not is_valid(leaf.get(key)):
            return f"{key} {shown(leaf.get(key))}"
    shape, folder = leaf["shape"], leaf["folder"]
    if len(shape) > MOST_AXES or math.prod(max(1, size) for size in shape) >= 2**60:
        return f"shape {shown(shape)}, which no array has"
    chunk = ".".join("0" for _ in shape) or "0"
    for name in () if 0 in shape else (".zarray", chunk):
        if f"arrays/{folder}/{name}" not in files:
            return f"folder {shown(folder)}, of whose file {name} it says nothing"
    return ""


def _check_file(folder: Path, name: str, facts: dict[str, Any]) -> None:
    path = folder / name
    try:
        with _open(folder, name) as file:
            size = os.fstat(file.fileno()).st_size
            found = _facts(file) if size == facts["bytes"] else {"bytes": size}
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None
    if any(facts[key] != value for key, value in found.items()):
        raise DamagedError(f"{path} is not as it was written: {found} instead of {facts}")


def _facts(file: BufferedReader) -> dict[str, Any]:
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"bytes": os.fstat(file.fileno()).st_size, "sha256": digest}


def _read(folder: Path, name: str) -> bytes:
    try:
        with _open(folder, name, LONGEST) as file:
            return file.read()
    except OSError as error:
        raise DamagedError(f"{folder / name}: {error.strerror}") from None


@contextlib.contextmanager
def _open(folder: Path, name: str, max_bytes: int | None = None) -> Iterator[BufferedReader]:
    """Opens a plain file that is reached without links, so that opening does not leave the folder."""
    path = folder
    *parents, last = name.split("/")
    for part in parents:
        path /= part
        if not stat.S_ISDIR(_mode(path)):
            raise DamagedError(f"{path} is not a folder")
    with open_plain(path / last, max_bytes=max_bytes, follow=False) as file:
        yield file


def _mode(path: Path) -> int:
    try:
        return path.lstat().st_mode
    except OSError as error:
        raise DamagedError(f"{path}: {error.strerror}") from None


def _is_sha256(x: object) -> bool:
    return isinstance(x, str) and _SHA256.fullmatch(x) is not None


_VALID: dict[str, Callable[[Any], bool]] = {
    "path": lambda x: isinstance(x, str),
    "kind": lambda x: isinstance(x, str),
    "folder": lambda x: isinstance(x, str) and _COMPONENT.fullmatch(x) is not None,
    "dtype": lambda x: isinstance(x, str) and x in STORED,
    "shape": lambda x: isinstance(x, list) and all(map(is_count, x)),
    "sha256": _is_sha256,
}
