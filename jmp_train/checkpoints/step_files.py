"""The files of a checkpoint folder, read: for each step a sealed safetensors file, `step_00000100.safetensors`.

Its arrays are named by the paths of the leaves, and its metadata have one more entry: the manifest, JSON with the step,
the caller's metadata and the kind, dtype and shape of each leaf. The file is written under a temporary name and put in
place by a rename, so it is whole, and a reader that has opened it reads on if it is replaced or removed. The sums
reveal damage, but whoever can write into the folder can forge them: so every name and shape is checked before it is
used.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

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
)

FORMAT = 2  # 1 were folders, see `restoring`
SUFFIX = ".safetensors"
MANIFEST = "jmp_train.checkpoint"  # the entry of the metadata
_STEP = r"step_([0-9]{8}|[1-9][0-9]{8,18})"
_WRITER = r"[A-Za-z0-9-]+"  # in names of version 0.1, whose `whole` was about to take the step's name
_SAVED = re.compile(rf"{_STEP}(\.safetensors|\.{_WRITER}\.whole)?")
LEFTOVER = re.compile(rf"\.{_STEP}\.safetensors\..+|{_STEP}(\.{_WRITER})+\.(tmp|deleted)")
_OF_THE_PROCESS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


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


def saved_steps(directory: Path) -> dict[int, list[Path]]:
    """Returns the steps, damaged or not, in ascending order, with the paths of each; the first one is the newest.

    There are several if version 0.1 saved the step, too. The result is empty if the directory does not exist.
    """
    found: dict[int, list[Path]] = {}
    for name in sorted(_names_in(directory), key=lambda name: (not name.endswith(SUFFIX), name)):
        if match := _SAVED.fullmatch(name):
            found.setdefault(int(match[1]), []).append(directory / name)
    return dict(sorted(found.items()))


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
            manifest = parse_json(f"{path}: its manifest", file.metadata[MANIFEST].encode())
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
