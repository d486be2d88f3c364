"""Checkpoints of a whole training state: written in the background, verified when they are read."""

import contextlib
import json
import operator
import os
import shutil
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, SupportsIndex, TypeVar

import jax
import numpy as np
from jax.core import Tracer

from jmp_train.checkpoints.folder_lock import lock_folder
from jmp_train.checkpoints.leaves import Leaf, as_ascii, leaves_of
from jmp_train.checkpoints.restoring import list_steps, read_metadata, read_state
from jmp_train.checkpoints.step_files import FORMAT, LEFTOVER, MANIFEST, SUFFIX, in_file, saved_steps
from jmp_train.distributed import BackgroundWriter, is_divided, placement, to_host, to_leaf
from jmp_train.policies import PyTree
from jmp_train.policies.files import write_safetensors
from jmp_train.policies.pytrees import check_flag, checked_path, is_key, path_name

State = TypeVar("State")


class CheckpointStore:
    """Checkpoints of the last few steps in a folder, each a safetensors file.

    `save` copies the state to the host and returns; a thread writes it, with the sha256 of every leaf, to a temporary
    file, and renames that when all is on the disk. A killed process loses only the step that it was writing. `restore`
    reads the newest intact step.

    One store saves into a folder at a time, from its `lock` or first `save` to its `close`. Any number of stores may
    read, which writes and removes nothing.

    With several processes, all call every method. Process 0 writes and reads, so the folder need not be shared.

    Args:
      directory: the folder of one training run, which is created if needed.
      max_to_keep: number of newest steps to keep, at least 1. Who is reading a step reads on if it is removed.
      read_only: True to refuse `lock` and `save`, and to create no folder. A folder that does not exist has no steps.

    Raises:
      ValueError: `max_to_keep` is out of range.
      OSError: the folder cannot be created. `lock` or the first `save` raises if it cannot be written to.

    Example:
      >>> import tempfile, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> state = jt.TrainState.create({"w": jnp.ones(2)}, optax.adam(1e-3))
      >>> with tempfile.TemporaryDirectory() as directory, jt.CheckpointStore(directory) as store:
      ...     store.save(7, state)
      ...     step, state = store.restore(state)
      >>> step
      7
    """

    def __init__(self, directory: str | Path, *, max_to_keep: int = 3, read_only: bool = False) -> None:
        if not isinstance(max_to_keep, int) or max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep!r} must be a whole number of at least 1")
        check_flag("read_only", read_only)
        self.directory = checked_path("directory", directory).absolute()
        self.max_to_keep = max_to_keep
        self.read_only = read_only
        self._closed = False
        self._writer: BackgroundWriter | None = None
        self._unlock: Callable[[], Any] | None = None
        if jax.process_index() == 0 and not read_only:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._writer = BackgroundWriter(self.directory)

    def __enter__(self) -> Self:
        """Returns the store."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the store."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps in the folder, damaged or not, in ascending order, as process 0 sees them."""
        return list_steps(self.directory)

    def lock(self) -> None:
        """Keeps other stores from saving into the folder until `close`, or the end of the process.

        The first `save` calls it if needed. A script that calls it first learns at its start, and not after an hour,
        that it was started twice. A killed process leaves no lock behind; its unfinished writes are removed
        now.

        Raises:
          ValueError: the store is read-only.
          OSError: another store, of this or another process, saves there; the message names it. Or the folder
            cannot be written to.

        Warns:
          UserWarning: the file system has no locks.
        """
        self._check_writable()
        if self._unlock is None and jax.process_index() == 0:
            release = lock_folder(self.directory)
            # Also if the store is deleted without `close`.
            self._unlock = weakref.finalize(self, release or (lambda: None))
            if release:
                clear_leftovers(self.directory)

    def save(self, step: SupportsIndex, state: PyTree, *, metadata: Mapping[str, Any] | None = None) -> None:
        """Copies the state and writes it in the background; first waits for the previous step to be written.

        When the script ends, the current write is still finished. If it fails and neither `wait` nor `close` is called,
        a line on stderr and exit code 1 report it.

        Args:
          step: its number; an earlier checkpoint of that step is replaced.
          state: tree of arrays, random keys and numbers. Arrays in another byte order than the machine's are
            converted.
          metadata: JSON data about the step, such as the run's options and versions; `metadata(step)` returns
            it.

        Raises:
          ValueError: `step` is negative or beyond int64, the store is closed or read-only, the state has no leaves, or
            a leaf was deleted or is an int beyond int64.
          TypeError: `step` is not an integer, a leaf is neither an array of one of jax's dtypes nor a number, or
            `metadata` is not JSON data.
          OSError: the previous step could not be written, or another store saves into the folder, see `lock`.

        Warns:
          UserWarning: an outdated step cannot be removed; from the thread.
        """
        number = checked_step(step)
        if self._closed:
            raise ValueError(f"the store of {self.directory} is closed: step {number} cannot be saved")
        self._check_writable()
        check_values(state)
        described, note = leaves_of(state), _as_json(metadata)
        self.lock()
        if self._writer is None:  # but all processes gather arrays that are divided between them
            for _, x in described:
                if is_divided(x):
                    to_host(x)
            return
        for _, x in described:
            if isinstance(x, jax.Array) and x.is_fully_addressable and not is_key(x):
                x.copy_to_host_async()  # all at once, before waiting for the first
        arrays = [to_host(x) for _, x in described]
        leaves = [leaf for leaf, _ in described]
        self._writer.start(number, lambda: write_step(self.directory, number, leaves, arrays, note, self.max_to_keep))

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns a step's verified metadata; empty if there are none.

        Args:
          step: its number, one of `steps()`.

        Raises:
          FileNotFoundError: there is no such step.
          ValueError: its manifest is damaged.
          OSError: a step could not be written.
        """
        step = checked_step(step)
        self.wait()
        return read_metadata(self.directory, step)

    def restore(self, state: State, *, step: int | None = None) -> tuple[int, State]:
        """Returns the number and state of the newest intact step, or of a given one.

        A damaged step is skipped, with a warning that names the step and the file or leaf.

        Args:
          state: a state with the structure, shapes and dtypes of the saved one, of arrays or, if no sharding is
            needed, `jax.ShapeDtypeStruct`. The result has the same placement, on any number of devices.
          step: one of `steps()`; None for the newest intact one.

        Raises:
          FileNotFoundError: there is no checkpoint, or not that step.
          ValueError: none is intact, or that step is not; or leaves differ in structure, shape or dtype; the message
            lists all of them.
          OSError: a step could not be written.
        """
        step = None if step is None else checked_step(step)
        self.wait()
        wanted = _leaves(state)
        found, _, arrays, damages = read_state(self.directory, lambda step, metadata: wanted, step)
        return found, _restored(state, arrays, damages)

    def restore_as(self, state_for: Callable[[int, dict[str, Any]], State]) -> tuple[int, State]:
        """Returns the newest intact step's number and its state, if the state's shapes depend on the step.

        Args:
          state_for: returns the state for `restore`, given a step's number and its metadata; its errors are
            raised.

        Raises:
          FileNotFoundError: there is no checkpoint.
          ValueError: see `restore`.
          OSError: see `restore`.

        Example:
          >>> import tempfile
          >>> with tempfile.TemporaryDirectory() as directory, CheckpointStore(directory) as store:
          ...     store.save(3, np.array([0.5, 0.4, 0.3]), metadata={"losses": 3})
          ...     store.restore_as(lambda step, metadata: np.zeros(metadata["losses"]))
          (3, array([0.5, 0.4, 0.3]))
        """
        self.wait()
        found, metadata, arrays, damages = read_state(
            self.directory, lambda step, metadata: _leaves(state_for(step, metadata)), None
        )
        return found, _restored(state_for(found, metadata), arrays, damages)

    def wait(self) -> None:
        """Waits until the last step is on the disk; raises OSError if it could not be written."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits. Afterwards steps can still be read, but not saved."""
        self._closed = True
        try:
            self.wait()
        finally:
            if self._unlock is not None:
                self._unlock()

    def _check_writable(self) -> None:
        if self.read_only:
            raise ValueError(f"the store of {self.directory} was opened with read_only=True")


def _leaves(state: PyTree) -> list[Leaf]:
    return [leaf for leaf, _ in leaves_of(state)]


def _restored(state: State, arrays: list[np.ndarray], damages: list[str]) -> State:
    """Returns the arrays in the structure and placement of `state`, and warns of damaged newer steps."""
    for damage in damages:
        warnings.warn(damage, stacklevel=3)
    leaves, structure = jax.tree_util.tree_flatten(state)
    placed = [to_leaf(array, like, placement(like)) for like, array in zip(leaves, arrays, strict=True)]
    return structure.unflatten(placed)


def _as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy of the metadata; raises TypeError for values that are not JSON data."""
    try:
        return json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must be JSON-serializable: {error}") from None


def check_values(state: PyTree) -> None:
    """Raises an error that names the leaf unless all leaves of a state have values that can be saved.

    Raises:
      TypeError: a leaf is a shape without values, an array that is being traced, or an array of another library.
      ValueError: a leaf was deleted, or there are no leaves.
    """
    leaves = jax.tree_util.tree_leaves_with_path(state)
    if not leaves:
        raise ValueError("the state has no leaves: there is nothing to save")
    for path, x in leaves:
        name = path_name(path)
        if isinstance(x, Tracer):
            raise TypeError(f"state {name!r} is traced: save outside of transforms such as jax.jit")
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TypeError(f"state {name!r} must be an array or a number, got {as_ascii(x)}")
        if isinstance(x, jax.Array) and x.is_deleted():
            raise ValueError(f"state {name!r} was deleted, usually by donation: save the state that the step returned")


def checked_step(step: SupportsIndex) -> int:
    """Returns a step's number; raises TypeError or ValueError if it is none."""
    try:
        number = operator.index(step)
    except TypeError:
        raise TypeError(f"step={as_ascii(step)} must be a whole number") from None
    if not 0 <= number < 2**63:
        raise ValueError(f"step={as_ascii(step)} must be at least 0 and below 2**63")
    return number


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
    write_safetensors(directory / f"step_{step:08d}{SUFFIX}", named, {MANIFEST: json.dumps(manifest)}, sealed=True)
    saved = saved_steps(directory)
    # Later steps, left behind by a run that went back, may be damaged: they do not count.
    until_now = [number for number in saved if number <= step]
    outdated = [path for number in until_now[:-max_to_keep] for path in saved[number]]
    for path in [*outdated, *saved.get(step, [])[1:]]:  # the second, if version 0.1 saved the step, too
        try:
            _remove(path)
        except OSError as error:  # the step itself is saved
            warnings.warn(f"step {step} is saved, but {path.name} cannot be removed: {error}", stacklevel=2)


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
        if LEFTOVER.fullmatch(path.name):
            with contextlib.suppress(OSError):
                path.unlink() if path.is_file() else shutil.rmtree(path)
