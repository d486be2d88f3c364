"""Reads steps from a folder in which a living writer may save, replace and remove steps meanwhile."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jmp_train.checkpoints.arrays import open_arrays, read_arrays
from jmp_train.checkpoints.file_locks import reading
from jmp_train.checkpoints.leaves import Leaf, differences, digest
from jmp_train.checkpoints.manifest import read_manifest, verified_manifest
from jmp_train.checkpoints.step_folders import saved_folders
from jmp_train.distributed import broadcast_arrays, gather_texts
from jmp_train.policies.files import DamagedError, printable

Found = TypeVar("Found")
LeavesFor = Callable[[int, dict[str, Any]], list[Leaf]]

ARRAYS = "arrays"
_ATTEMPTS = 100
_ERRORS = (FileNotFoundError, OSError, DamagedError, ValueError)  # the most specific first


def read_state(
    directory: Path, leaves_for: LeavesFor, step: int | None
) -> tuple[int, dict[str, Any], list[np.ndarray], list[str]]:
    """Returns a step's number, metadata and arrays, and descriptions of damaged newer steps, as process 0 reads them.

    It writes nothing. If a step is removed or replaced while it is read, it is not damaged: it is looked up again.

    Args:
      directory: the steps' folder; one that does not exist has no steps.
      leaves_for: returns the leaves that a step must have, given its number and its metadata.
      step: the number of the step; None for the newest intact one.

    Raises:
      FileNotFoundError: there is no step, or not that one.
      DamagedError: that step is damaged, or no step is intact.
      ValueError: the step has other leaves.
      OSError: each step was removed while it was read, a hundred times.
    """

    def read() -> tuple[int, tuple[dict[str, Any], list[np.ndarray]], list[str]]:
        return _read_first(directory, step, lambda folder: _read_arrays(folder, leaves_for))

    number, (metadata, arrays), damages = _read_by_main(read, (0, ({}, []), []))
    if jax.process_count() > 1:
        number, metadata = _from_main([number, metadata])
        if jax.process_index():
            arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves_for(number, metadata)]
        arrays = broadcast_arrays(arrays)
    return number, metadata, arrays, damages


def read_metadata(directory: Path, step: int) -> dict[str, Any]:
    """Returns a step's metadata as process 0 reads them; raises as `read_state` does."""

    def read() -> dict[str, Any]:
        return _read_first(directory, step, lambda folder: _metadata(verified_manifest(folder)))[1]

    return _from_main(_read_by_main(read, {}))


def _read_by_main(read: Callable[[], Found], otherwise: Found) -> Found:
    """Returns the result of process 0, and a default in other processes; raises its error in all processes."""
    if jax.process_count() == 1:
        return read()
    found, failure = otherwise, ""
    if jax.process_index() == 0:
        try:
            found = read()
        except _ERRORS as error:
            kind = next(kind for kind in _ERRORS if isinstance(error, kind))
            failure = f"{kind.__name__} {error}"
    name, _, text = gather_texts(failure)[0].partition(" ")
    for kind in _ERRORS:
        if name == kind.__name__:
            raise kind(text)
    return found


def _from_main(data: Any) -> Any:
    """Returns the JSON data of process 0 in all processes."""
    return json.loads(gather_texts(json.dumps(data))[0])


def _read_first(directory: Path, step: int | None, read: Callable[[Path], Found]) -> tuple[int, Found, list[str]]:
    """Returns the number of the given or newest readable step, the data read from it, and damages of newer steps."""
    for _ in range(_ATTEMPTS):
        damages: list[str] = []
        for number, folder in _newest_first(directory, step):
            with reading(folder) as is_there:
                try:
                    return number, read(folder), damages
                except DamagedError as damage:
                    if not is_there():
                        break
                    damages.append(f"step {number} is damaged: {damage}")
        else:
            break
    else:
        raise OSError(f"all steps in {directory} were removed while reading them")
    if damages and step is not None:
        raise DamagedError("; ".join(damages))
    if damages:
        raise DamagedError(f"no checkpoint in {directory} is intact: {'; '.join(damages)}")
    raise FileNotFoundError(_what_is_missing(directory, step))


def _newest_first(directory: Path, step: int | None) -> Iterator[tuple[int, Path]]:
    for number, folders in reversed(saved_folders(directory).items()):
        for folder in folders if step in (None, number) else ():
            yield number, folder


def _what_is_missing(directory: Path, step: int | None) -> str:
    what = "checkpoint" if step is None else f"step {step}"
    if not directory.exists():
        return f"there is no {what} in {directory}, which does not exist"
    if step is None:
        return f"there is no checkpoint in {directory}"
    others = ", ".join(map(str, saved_folders(directory))) or "none"
    return f"there is no {what} in {directory}, only: {others}"


def _metadata(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest.get("metadata", {})


def _read_arrays(folder: Path, leaves_for: LeavesFor) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns a step's metadata, and its arrays in the order of the required leaves."""
    manifest = read_manifest(folder)
    leaves = manifest["leaves"]
    opened = open_arrays(folder / ARRAYS, leaves)
    saved = [Leaf(x["path"], x["kind"], x["dtype"], tuple(x["shape"])) for x in leaves]
    step = int(folder.name.partition(".")[0].removeprefix("step_"))
    wanted = leaves_for(step, _metadata(manifest))
    if lines := differences(saved, wanted):
        raise ValueError("\n  ".join([f"step {step} of {folder.parent} does not fit the state:", *lines]))
    arrays = read_arrays(opened, leaves)
    for x, array in zip(leaves, arrays, strict=True):
        if digest(array) != x["sha256"]:
            raise DamagedError(f"leaf {printable(x['path'])} is not what was saved")
    found = dict(zip(saved, arrays, strict=True))
    return _metadata(manifest), [found[leaf] for leaf in wanted]
