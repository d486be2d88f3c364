"""The files of a checkpoint folder: for each step a sealed safetensors file, `step_00000100.safetensors`.

Its arrays are named by the paths of the leaves, and its metadata have one more entry: the manifest, JSON with the step,
the caller's metadata and the kind, dtype and shape of each leaf. The file is written under a temporary name and put in
place by a rename, so it is whole, and a reader that has opened it reads on if it is replaced or removed. The sums
reveal damage, but whoever can write into the folder can forge them: so every name and shape is checked before it is
used.
"""

import contextlib
import errno
import json
import operator
import os
import re
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex

import jax
import numpy as np

from jmp_train.checkpoints.leaves import Leaf, as_ascii, leaves_in
from jmp_train.distributed import as_bytes
from jmp_train.policies.files import (
    DTYPES,
    DamagedError,
    SafetensorsFile,
    damage_named,
    parse_json,
    printable,
    write_safetensors,
)

FORMAT = 2  # 1 were folders, see `released_folders`
SUFFIX = ".safetensors"
_MANIFEST = "jmp_train.checkpoint"  # the entry of the metadata
_STEP = r"step_([0-9]{8}|[1-9][0-9]{8,18})"
_WRITER = r"[A-Za-z0-9-]+"  # in names of version 0.1, whose `whole` was about to take the step's name
_SAVED = re.compile(rf"{_STEP}(\.safetensors|\.{_WRITER}\.whole)?")
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_LEFTOVER = re.compile(rf"\.{_STEP}\.safetensors\..+|{_STEP}(\.{_WRITER})+\.(tmp|deleted)")


class SavedStep(NamedTuple):
    """A saved step that is open for reading.

    Attributes:
      metadata: the caller's.
      leaves: the leaves that it has.
      read: returns the array of one of them; raises DamagedError if it is not as it was written.
    """

    metadata: dict[str, Any]
    leaves: list[Leaf]
    read: Callable[[Leaf], np.ndarray]


def checked_step(step: SupportsIndex) -> int:
    """Returns a step's number; raises TypeError or ValueError if it is none."""
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step={as_ascii(step)} must be a whole number") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"step={as_ascii(step)} must be at least 0 and below 2**63")
    return number


def saved_steps(directory: Path) -> dict[int, list[Path]]:
    """Returns the steps, damaged or not, in ascending order, with the paths of each; the first one is the newest.

    There are several if version 0.1 saved the step, too. The result is empty if the directory does not exist.
    """
    found: dict[int, list[Path]] = {}
    for name in sorted(_names_in(directory), key=lambda name: (not name.endswith(SUFFIX), name)):
        if match := _SAVED.fullmatch(name):
            found.setdefault(int(match[1]), []).append(directory / name)
    return dict(sorted(found.items()))


def write_step(
    directory: Path,
    step: int,
    leaves: list[Leaf],
    arrays: list[np.ndarray],
    metadata: dict[str, Any],
    max_to_keep: int,
) -> None:
    """Writes a step atomically, then removes outdated steps.

    Args:
      directory: the folder.
      step: its number; a file of that step is replaced.
      leaves: the leaves.
      arrays: their arrays.
      metadata: JSON data.
      max_to_keep: number of newest steps to keep.

    Raises:
      OSError: the file cannot be written; an older one is still there.

    Warns:
      UserWarning: an outdated step cannot be removed.
    """
    described = [leaf._asdict() for leaf in leaves]
    manifest = {"format": FORMAT, "step": step, "jax": jax.__version__, "metadata": metadata, "leaves": described}
    named = {leaf.path: in_file(array) for leaf, array in zip(leaves, arrays, strict=True)}
    write_safetensors(directory / f"step_{step:08d}{SUFFIX}", named, {_MANIFEST: json.dumps(manifest)}, sealed=True)
    saved = saved_steps(directory)
    # Later steps, left behind by a run that went back, may be damaged: they do not count.
    until_now = [number for number in saved if number <= step]
    outdated = [path for number in until_now[:-max_to_keep] for path in saved[number]]
    for path in [*outdated, *saved.get(step, [])[1:]]:  # the second, if version 0.1 saved the step, too
        try:
            _remove(path)
        except OSError as error:  # the step itself is saved
            warnings.warn(f"step {step} is saved, but {path.name} cannot be removed: {error}", stacklevel=2)


def in_file(array: np.ndarray) -> np.ndarray:
    """Returns an array as a safetensors file holds it: its bytes, if the format does not have its dtype."""
    return array if array.dtype.name in DTYPES.values() else as_bytes(array)


@contextlib.contextmanager
def open_step(path: Path, step: int) -> Iterator[SavedStep]:
    """Opens the file of a step for reading.

    Args:
      path: the file.
      step: the number in its name.

    Raises:
      DamagedError: the file cannot be read or is not as it was written, or not of this step.
    """
    with contextlib.ExitStack() as stack:
        with unreadable_is_damaged(path):
            file = stack.enter_context(SafetensorsFile(path, sealed=True))
            manifest = parse_json(f"{path}: its manifest", file.metadata[_MANIFEST].encode())
            metadata, leaves = checked_manifest(manifest, FORMAT, step)

        def read(leaf: Leaf) -> np.ndarray:
            with unreadable_is_damaged(f"{path}: leaf {printable(leaf.path)}"):
                return file.read(leaf.path).view(leaf.dtype).reshape(leaf.shape)

        yield SavedStep(metadata, leaves, read)


def checked_manifest(manifest: dict[str, Any], version: int, step: int) -> tuple[dict[str, Any], list[Leaf]]:
    """Returns the caller's metadata and the leaves in a manifest; raises an error that says what is wrong with it."""
    if manifest["format"] != version:
        raise ValueError(f"it has format {as_ascii(manifest['format'])}, this version of jmp_train reads {version}")
    if type(manifest["step"]) is not int or manifest["step"] != step:
        raise ValueError(f"it is of step {as_ascii(manifest['step'])}")
    metadata = manifest.get("metadata", {})  # version 0.1 leaves out none
    if not isinstance(metadata, dict):
        raise ValueError(f"it has metadata {as_ascii(metadata)}")
    return metadata, leaves_in(manifest["leaves"])


@contextlib.contextmanager
def unreadable_is_damaged(what: object) -> Iterator[None]:
    """Turns errors of reading a file, and of trusting its content, into a DamagedError that names it.

    Not those of the process, which say nothing about the file: an older step would be restored for want of memory.
    """
    try:
        with damage_named(what):
            yield
    except OSError as error:
        if error.errno in _OF_THE_PROCESS:
            raise
        raise DamagedError(f"{what}: {error.strerror}") from None


def _remove(path: Path) -> None:
    """Removes a saved step, in a way that never leaves half of one of version 0.1 under its name."""
    if not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_name(f"{path.name}.{os.getpid()}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def clear_leftovers(directory: Path) -> None:
    """Removes what dead writers left; what cannot be removed, such as another user's, stays.

    Args:
      directory: the folder. The caller has its lock, so every other writer is dead.
    """
    for path in directory.iterdir():
        if _LEFTOVER.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path)


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
