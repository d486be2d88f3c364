"""Checkpoints of a whole training state: written in the background, verified when they are read."""

import json
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, SupportsIndex, TypeVar

import jax
import numpy as np

from jmp_train.checkpoints.folder_lock import lock_folder
from jmp_train.checkpoints.leaves import Leaf, check_values, leaves_of
from jmp_train.checkpoints.restoring import list_steps, read_metadata, read_state
from jmp_train.checkpoints.step_files import checked_step, clear_leftovers, write_step
from jmp_train.distributed import BackgroundWriter, is_divided, placement, to_host, to_leaf
from jmp_train.policies import PyTree
from jmp_train.policies.pytrees import check_flag, checked_path, is_key

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
