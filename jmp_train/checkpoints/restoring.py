"""Reads steps from a folder in which a living writer may save, replace and remove steps meanwhile.

Checkpoints of version 0.1 are a folder per step, with a manifest and a zarr array for each leaf.
tensorstore, which flax installs, decodes the arrays; their files are read here, so that it sees plain files only.

Reference: https://zarr-specs.readthedocs.io/en/latest/v2/v2.0.html (the files of each array).
"""

import contextlib
import errno
import hashlib
import json
import math
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from jmp_train.checkpoints.leaves import Leaf, differences
from jmp_train.checkpoints.step_files import (
    SUFFIX,
    SavedStep,
    checked_manifest,
    open_step,
    saved_steps,
    unreadable_is_damaged,
)
from jmp_train.distributed import broadcast_arrays, gather_texts
from jmp_train.policies.files import DamagedError, parse_json, printable, read_plain

Found = TypeVar("Found")
LeavesFor = Callable[[int, dict[str, Any]], list[Leaf]]

_ATTEMPTS = 100
_ERRORS = (FileNotFoundError, OSError, DamagedError, ValueError, TypeError, RuntimeError)  # the most specific first


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
        return _read_first(directory, step, lambda number, path: _read_arrays(number, path, leaves_for))

    number, (metadata, arrays), damages = _read_by_main(read, (0, ({}, []), []))
    if jax.process_count() > 1:
        number, metadata = _as_in_main([number, metadata])
        if jax.process_index():
            arrays = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves_for(number, metadata)]
        arrays = broadcast_arrays(arrays)
    return number, metadata, arrays, damages


def read_metadata(directory: Path, step: int) -> dict[str, Any]:
    """Returns a step's metadata as process 0 reads them; raises as `read_state` does."""
    return _from_main(lambda: _read_first(directory, step, _read_metadata)[1], {})


def list_steps(directory: Path) -> list[int]:
    """Returns the steps in a folder, damaged or not, in ascending order, as process 0 sees them."""
    return _from_main(lambda: list(saved_steps(directory)), [])


def _read_by_main(read: Callable[[], Found], otherwise: Found) -> Found:
    """Returns the result of process 0, and a default in other processes; raises its error in all processes."""
    if jax.process_count() == 1:
        return read()
    found, failure = otherwise, None
    if jax.process_index() == 0:
        try:
            found = read()
        except Exception as error:  # noqa: BLE001 - any, for the others wait
            failure = error
    name, _, text = gather_texts("" if failure is None else _told(failure))[0].partition(" ")
    if failure is not None:
        raise failure
    if name:
        raise next(kind for kind in _ERRORS if name == kind.__name__)(text)
    return found


def _told(error: Exception) -> str:
    """Returns what the other processes raise: the name of one of `_ERRORS`, and the message."""
    for kind in _ERRORS:
        if isinstance(error, kind):
            return f"{kind.__name__} {error}"
    return f"RuntimeError process 0 raised {type(error).__name__}: {error}"


def _from_main(read: Callable[[], Any], otherwise: Any) -> Any:
    """Returns the JSON data that process 0 reads in all processes."""
    return _as_in_main(_read_by_main(read, otherwise))


def _as_in_main(data: Any) -> Any:
    return json.loads(gather_texts(json.dumps(data))[0])


def _read_first(directory: Path, step: int | None, read: Callable[[int, Path], Found]) -> tuple[int, Found, list[str]]:
    """Returns the number of the given or newest readable step, the data read from it, and damages of newer steps."""
    for _ in range(_ATTEMPTS):
        damages: list[str] = []
        for number, path in _newest_first(directory, step):
            before = _identity(path)
            try:
                return number, read(number, path), damages
            except DamagedError as damage:
                if before == errno.ENOENT or _identity(path) != before:
                    break  # removed or replaced meanwhile
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
    for number, paths in reversed(saved_steps(directory).items()):
        for path in paths if step in (None, number) else ():
            yield number, path


def _identity(path: Path) -> object:
    """Returns what differs between two files that had the same path; an error's number if it cannot be looked at."""
    try:
        found = path.lstat()
    except OSError as error:
        return error.errno
    return found.st_dev, found.st_ino


def _what_is_missing(directory: Path, step: int | None) -> str:
    what = "checkpoint" if step is None else f"step {step}"
    if not directory.exists():
        return f"there is no {what} in {directory}, which does not exist"
    if step is None:
        return f"there is no checkpoint in {directory}"
    others = ", ".join(map(str, saved_steps(directory))) or "none"
    return f"there is no {what} in {directory}, only: {others}"


def _open(path: Path, step: int) -> contextlib.AbstractContextManager[SavedStep]:
    return open_step(path, step) if path.suffix == SUFFIX else open_folder(path, step)


def _read_metadata(step: int, path: Path) -> dict[str, Any]:
    with _open(path, step) as saved:
        return saved.metadata


def _read_arrays(step: int, path: Path, leaves_for: LeavesFor) -> tuple[dict[str, Any], list[np.ndarray]]:
    """Returns a step's metadata, and its arrays in the order of the required leaves."""
    with _open(path, step) as saved:
        wanted = leaves_for(step, saved.metadata)
        if lines := differences(saved.leaves, wanted):
            raise ValueError("\n  ".join([f"step {step} of {path.parent} does not fit the state:", *lines]))
        return saved.metadata, [saved.read(leaf) for leaf in wanted]


_LONGEST = 2**26  # bytes of a manifest; a leaf takes about 600 of them


@contextlib.contextmanager
def open_folder(folder: Path, step: int) -> Iterator[SavedStep]:
    """Opens the folder of a step for reading.

    Args:
      folder: the folder.
      step: the number in its name.

    Raises:
      DamagedError: the folder cannot be read or is not as it was written, or not of this step.
    """
    with unreadable_is_damaged(folder):
        if not stat.S_ISDIR(folder.lstat().st_mode):
            raise DamagedError(f"{folder} is not a folder")
    text = _content(folder, "manifest.json")
    with unreadable_is_damaged(folder / "manifest.json"):
        if hashlib.sha256(text).hexdigest().encode() != _content(folder, "manifest.sha256"):
            raise ValueError("it or manifest.sha256 is not as it was written")
        manifest = parse_json(folder / "manifest.json", text)
        metadata, leaves = checked_manifest(manifest, 1, step)
        about = {x["path"]: (x["folder"], x["sha256"]) for x in manifest["leaves"]}

    def read(leaf: Leaf) -> np.ndarray:
        name, digest = about[leaf.path]
        with unreadable_is_damaged(f"{folder}: leaf {printable(leaf.path)}"):
            array = _array(folder, f"arrays/{name}", leaf)
            if hashlib.sha256(array.tobytes()).hexdigest() != digest:
                raise ValueError("it is not what was saved")
        return array

    yield SavedStep(metadata, leaves, read)


def _array(folder: Path, name: str, leaf: Leaf) -> np.ndarray:
    if 0 in leaf.shape:
        return np.zeros(leaf.shape, leaf.dtype)  # without files
    import tensorstore

    chunk, memory = ".".join("0" for _ in leaf.shape) or "0", tensorstore.Context()
    kept = tensorstore.KvStore.open({"driver": "memory"}, context=memory).result()
    most = _LONGEST + 2 * np.dtype(leaf.dtype).itemsize * math.prod(leaf.shape)  # zstd makes random numbers longer
    for file in (".zarray", chunk):
        kept.write(file, _content(folder, f"{name}/{file}", most)).result()
    layout = {"chunks": list(leaf.shape), "order": "C"}  # one chunk
    try:
        stored = tensorstore.open(
            {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": layout}, open=True, context=memory
        ).result()
        return np.asarray(stored.read().result()).view(leaf.dtype).reshape(leaf.shape)
    except Exception as error:  # noqa: BLE001 - tensorstore's errors are of many classes
        message = re.split(r" \[(?:tensorstore_spec|source locations|os_error_code)=", str(error))[0]
        raise DamagedError(f"{folder / name} is not {leaf}: {printable(message)}") from None


def _content(folder: Path, name: str, max_bytes: int = _LONGEST) -> bytes:
    """Returns the content of a plain file in the folder, to which no link leads."""
    path = folder / name
    with unreadable_is_damaged(path):
        if path.parent.resolve() != folder.resolve() / Path(name).parent:
            raise DamagedError(f"{path} is not in the folder")
        return read_plain(path, max_bytes=max_bytes, follow=False)
