"""Checkpoints of a whole training state: written in the background, verified when they are read."""

import json
import operator
import tempfile
import warnings
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self, SupportsIndex, TypeVar

import jax
import numpy as np

from jmp_train.checkpoint_arrays import open_arrays, read_arrays, write_arrays
from jmp_train.checkpoint_files import clear_leftovers, commit, remove, saved_steps, step_folder
from jmp_train.checkpoint_leaves import (
    Leaf,
    check_values,
    differences,
    digest,
    file_name,
    leaves_of,
    to_host,
)
from jmp_train.checkpoint_lock import lock_folder
from jmp_train.checkpoint_manifest import FORMAT, DamagedError, read_manifest, verified_manifest
from jmp_train.checkpoint_writer import BackgroundWriter
from jmp_train.distributed import broadcast_arrays, gather_texts
from jmp_train.host_arrays import is_divided, is_key, placement, to_leaf

State = TypeVar("State")

_ARRAYS = "arrays"


class CheckpointStore:
    """Checkpoints of the last few steps in a folder, the arrays in a format of orbax's.

    `save` copies the state to the host and returns; a thread writes it, beside its place, with the sha256 of every
    file and leaf, and renames it when all is on the disk. A process that is killed loses no more than the step
    that it was writing. `restore` reads the newest step that is as it was written.

    One store saves into a folder at a time, from its `lock` or first `save` to its `close`; any number may read.

    Of several processes all call every method. Process 0 writes and reads, so the folder need not be shared.

    Args:
      directory: a folder, which is made if it is not there; one training run's own.
      max_to_keep: how many steps to keep, the newest; at least 1.

    Raises:
      ValueError: `max_to_keep` is out of range.
      OSError: the folder cannot be made or written to.

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

    def __init__(self, directory: str | Path, *, max_to_keep: int = 3) -> None:
        if not isinstance(max_to_keep, int) or max_to_keep < 1:
            raise ValueError(f"max_to_keep={max_to_keep!r} must be a whole number of at least 1")
        self.directory = Path(directory).absolute()
        self.max_to_keep = max_to_keep
        self._closed = False
        self._writer: BackgroundWriter | None = None
        self._unlock: Callable[[], Any] | None = None
        if jax.process_index() == 0:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                pass  # it can be written to
            clear_leftovers(self.directory)
            self._writer = BackgroundWriter(self.directory)

    def __enter__(self) -> Self:
        """Returns the store."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Closes the store."""
        self.close()

    def steps(self) -> list[int]:
        """Returns the steps that are in the folder, damaged or not, in ascending order."""
        return saved_steps(self.directory) if self.directory.is_dir() else []

    def lock(self) -> None:
        """Keeps other stores from saving into the folder until `close`, or the end of the process.

        The first `save` does it where this was not called; a script that calls it first learns at its start, and not after
        an hour, that it was started twice. A killed process leaves no lock behind.

        Raises:
          OSError: another store, of this or another process, saves there; the message says which. Or the folder
            cannot be written to.

        Warns:
          UserWarning: the file system has no locks, so there is none.
        """
        if self._unlock is None and jax.process_index() == 0:
            lock = lock_folder(self.directory)
            # Also when the store is forgotten without `close`.
            self._unlock = weakref.finalize(self, lock.release if lock else lambda: None)

    def save(
        self, step: SupportsIndex, state: Any, *, metadata: Mapping[str, Any] | None = None
    ) -> None:
        """Copies the state, and has it written in the background; waits for the step before, if need be.

        What is being written when the script ends is still written. If that fails, and nobody asks by `wait` or
        `close`, a line on stderr and exit code 1 tell it.

        Args:
          step: its number, which replaces an earlier checkpoint of that step.
          state: tree of arrays, random keys and numbers. Arrays whose bytes are in another order than the
            machine's are converted.
          metadata: what else there is to say of the step, such as the run's options and versions, as JSON has it;
            `metadata(step)` returns it.

        Raises:
          ValueError: `step` is negative or beyond int64, the store is closed, the state has no leaves, or a leaf was
            deleted or is an int beyond int64.
          TypeError: `step` is no whole number, a leaf is neither an array of a dtype of jax's nor a number, or
            `metadata` is not what JSON has.
          OSError: the step before could not be written, or another store saves into the folder, see `lock`.
        """
        number = _checked_step(step)
        if self._closed:
            raise ValueError(
                f"the store of {self.directory} is closed: step {number} cannot be saved"
            )
        check_values(state)
        described, note = leaves_of(state), _as_json(metadata)
        self.lock()
        if self._writer is None:  # but what is divided between processes is gathered by all
            for _, x in described:
                if is_divided(x):
                    to_host(x)
            return
        for _, x in described:
            if isinstance(x, jax.Array) and x.is_fully_addressable and not is_key(x):
                x.copy_to_host_async()  # all at once, before the first is waited for
        arrays = [to_host(x) for _, x in described]
        leaves = [leaf for leaf, _ in described]
        self._writer.start(number, lambda: self._write(number, leaves, arrays, note))

    def metadata(self, step: int) -> dict[str, Any]:
        """Returns the metadata that a step was saved with, verified; empty if there is none.

        Args:
          step: its number, one of `steps()`.

        Raises:
          FileNotFoundError: there is no such step.
          ValueError: its manifest is damaged.
          OSError: a step could not be written.
        """
        self.wait()
        found, failure = {}, ""
        if jax.process_index() == 0:
            try:
                self._check_saved(step)
                found = verified_manifest(step_folder(self.directory, step)).get("metadata", {})
            except (FileNotFoundError, DamagedError) as error:
                failure = _as_text(error)
        _raise_in_all(failure)
        return json.loads(gather_texts(json.dumps(found))[0])

    def restore(self, state: State, *, step: int | None = None) -> tuple[int, State]:
        """Returns the newest intact step's number and its state, or a given step's.

        A damaged step is passed over, with a warning that names it and the file or leaf.

        Args:
          state: of the same structure, shapes and dtypes as what was saved; arrays or, where no sharding is
            wanted, `jax.ShapeDtypeStruct`. Its placement is that of the result, on any number of devices.
          step: which, one of `steps()`; None for the newest intact one.

        Raises:
          FileNotFoundError: there is no checkpoint, or not that step.
          ValueError: none is intact, or that step is not; or leaves differ in structure, shape or dtype; the message lists all of them.
          OSError: a step could not be written.
        """
        self.wait()
        read = self._read if jax.process_count() == 1 else self._read_in_process_0
        found, arrays = read(state, step)
        leaves, structure = jax.tree_util.tree_flatten(state)
        placed = [
            to_leaf(array, like, placement(like))
            for like, array in zip(leaves, arrays, strict=True)
        ]
        return found, structure.unflatten(placed)

    def wait(self) -> None:
        """Waits until the last step is on the disk; raises OSError if it could not be written."""
        if self._writer is not None:
            self._writer.wait()

    def close(self) -> None:
        """Waits. Steps can still be read then, but no more be saved."""
        self._closed = True
        try:
            self.wait()
        finally:
            if self._unlock is not None:
                self._unlock()

    def _write(
        self,
        step: int,
        leaves: list[Leaf],
        arrays: list[np.ndarray],
        metadata: dict[str, Any],
    ) -> None:
        names = [file_name(number, leaf.path) for number, leaf in enumerate(leaves)]
        manifest = {
            "format": FORMAT,
            "step": step,
            "jax": jax.__version__,
            "metadata": metadata,
            "leaves": [
                {**leaf._asdict(), "folder": name, "sha256": digest(array)}
                for leaf, name, array in zip(leaves, names, arrays, strict=True)
            ],
        }
        # Of arrays without elements nothing is stored.
        named = {name: array for name, array in zip(names, arrays, strict=True) if array.size}
        commit(
            step_folder(self.directory, step),
            manifest,
            lambda folder: write_arrays(folder / _ARRAYS, named),
        )
        # Later steps, which a run that went back left behind, may be damaged: they do not count.
        until_now = [number for number in saved_steps(self.directory) if number <= step]
        for old in until_now[: -self.max_to_keep]:
            remove(step_folder(self.directory, old))

    def _read_in_process_0(self, state: Any, step: int | None) -> tuple[int, list[np.ndarray]]:
        """Returns what process 0 reads, or raises what it raises, in all processes."""
        wanted = [leaf for leaf, _ in leaves_of(state)]
        found, arrays = 0, [np.zeros(leaf.shape, leaf.dtype) for leaf in wanted]
        failure = ""
        if jax.process_index() == 0:
            try:
                found, arrays = self._read(state, step)
            except (FileNotFoundError, ValueError) as error:
                failure = _as_text(error)
        _raise_in_all(failure)
        found, arrays = broadcast_arrays((np.asarray(found), arrays))
        return int(found), arrays

    def _read(self, state: Any, step: int | None) -> tuple[int, list[np.ndarray]]:
        wanted = [leaf for leaf, _ in leaves_of(state)]
        if step is not None:
            self._check_saved(step)
            return step, self._read_step(step, wanted)
        damages = []
        for number in reversed(self.steps()):
            try:
                return number, self._read_step(number, wanted)
            except DamagedError as damage:
                damages.append(str(damage))
                warnings.warn(damages[-1], stacklevel=3)
        if damages:
            raise ValueError(f"no checkpoint in {self.directory} is intact: {'; '.join(damages)}")
        raise FileNotFoundError(f"there is no checkpoint in {self.directory}")

    def _read_step(self, step: int, wanted: list[Leaf]) -> list[np.ndarray]:
        folder = step_folder(self.directory, step)
        try:
            manifest = read_manifest(folder)
            opened = open_arrays(folder / _ARRAYS, manifest["leaves"])
            saved = [
                Leaf(x["path"], x["kind"], x["dtype"], tuple(x["shape"]))
                for x in manifest["leaves"]
            ]
            lines = differences(saved, wanted)
            if lines:
                raise ValueError(
                    f"step {step} of {self.directory} does not fit the state:\n  "
                    + "\n  ".join(lines)
                )
            arrays = _read_checked(manifest["leaves"], opened)
        except DamagedError as damage:
            raise DamagedError(f"step {step} is damaged: {damage}") from damage
        found = dict(zip(saved, arrays, strict=True))
        return [found[leaf] for leaf in wanted]

    def _check_saved(self, step: int) -> None:
        if step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise FileNotFoundError(f"there is no step {step} in {self.directory}, only: {there}")


def _checked_step(step: Any) -> int:
    try:
        number = None if isinstance(step, bool | np.bool_) else operator.index(step)
    except TypeError:
        number = None
    if number is None:
        raise TypeError(f"step={step!r} must be a whole number")
    if number < 0:
        raise ValueError(f"step={number} must be at least 0")
    if number >= 2**63:
        raise ValueError("step must be below 2**63, as an int64 is")
    return number


def _read_checked(leaves: list[dict[str, Any]], opened: list[Any]) -> list[np.ndarray]:
    """Returns the leaves' arrays; raises DamagedError if one is not what was saved."""
    arrays = read_arrays(opened, leaves)
    for x, array in zip(leaves, arrays, strict=True):
        if digest(array) != x["sha256"]:
            raise DamagedError(f"leaf {x['path']} is not what was saved")
    return arrays


def _as_json(metadata: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns a copy; raises TypeError for what JSON does not have."""
    if not isinstance(metadata, Mapping | None):
        raise TypeError(f"metadata must be a dict, got {type(metadata).__name__}")
    try:
        return json.loads(json.dumps(dict(metadata or {})))
    except (TypeError, ValueError) as error:
        raise TypeError(f"metadata must be what JSON has: {error}") from None


def _as_text(error: Exception) -> str:
    return f"{type(error).__name__} {error}"


def _raise_in_all(failure: str) -> None:
    """Raises in all processes what `_as_text` made of an error of process 0; "" is none."""
    kind, _, text = gather_texts(failure)[0].partition(" ")
    for error in (FileNotFoundError, DamagedError):
        if kind == error.__name__:
            raise error(text)
    if kind:
        raise ValueError(text)
