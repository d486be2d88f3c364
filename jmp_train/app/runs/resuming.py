"""Saving and resuming runs of the command line: periodic checkpoints, stop on a signal.

The identity of a run in its checkpoints: task, options that affect results, digest of the data.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jmp_train.app.runs.events import Epoch, StepRecord
from jmp_train.app.runs.run_settings import RunLength, RunSettings
from jmp_train.app.runs.task_batches import DataPosition
from jmp_train.checkpoints import CheckpointStore, DamagedError
from jmp_train.distributed import as_bytes, is_main_process
from jmp_train.graphs.structure import CSR, CSRAndCSC
from jmp_train.policies import PyTree
from jmp_train.policies.files import write_atomically
from jmp_train.policies.pytrees import change_nodes, named_leaves
from jmp_train.steps import TrainState
from jmp_train.task import Task, count_examples

_PACKAGES = ("jmp_train", "jax", "jaxlib", "flax", "optax", "numpy")
_FILES = 1000  # number of the data's files whose sizes count


def run_metadata(
    task: Task,
    policy: str,
    batch_size: int | None,
    epochs: int,
    settings: RunSettings,
    shared: PyTree,
) -> dict[str, Any]:
    """Returns the metadata of a run in its checkpoints, as JSON data.

    `run` has all options that affect its results, by the names of the command line, with None for defaults,
    and digests of the data and of rules from a file. The rest is for people: the paths of data and rules, which may
    move, the device and the versions. `definitions` has digests of the definitions in a user's file, which may change.

    Args:
      task: the task.
      policy: the name of the policy, mode or schedule.
      batch_size: examples per step; None if the batches decide.
      epochs: passes over the data.
      settings: the settings of the run. `identity` has the task's name as "task", its options that affect results as
        "options", the paths among them as "files", and the "definitions" of a user's file.
      shared: the result of `task.shared`, a tree of arrays.
    """
    said = settings.identity
    train = None if callable(task.train) else task.train
    test = None if callable(task.test) else task.test
    digest = data_digest(train, test, shared) if train or test or shared else None
    optional = {
        "train_size": None if train is None else count_examples(train),
        "accumulate_steps": None if settings.accumulate_steps == 1 else settings.accumulate_steps,
        "growth_interval": settings.growth_interval,
        "learning_rate": settings.learning_rate,
        "rules": None if settings.rules is None else settings.rules.digest,
        "steps": settings.steps,
        "batch_size": batch_size,
        "data": digest,
    }
    rules = settings.rules
    return {
        "run": {
            "task": said.get("task"),
            **said.get("options", {}),
            "devices": settings.devices,
            "policy": policy,
            **settings.few_bits.metadata(),
            "epochs": epochs,
            "seed": settings.seed,
            **{name: value for name, value in optional.items() if value is not None},
        },
        **said.get("files", {}),
        **({} if rules is None else {"rules_file": str(rules.path.absolute())}),
        **({"definitions": said["definitions"]} if "definitions" in said else {}),
        "device": jax.local_devices()[0].device_kind,
        "versions": {package: _version(package) for package in _PACKAGES},
    }


def differences(saved: Mapping[str, Any], this: Mapping[str, Any]) -> list[str]:
    """Returns a line for each option that differs between two runs.

    Args:
      saved: `run` of a checkpoint's metadata.
      this: `run` of the current metadata.

    Example:
      >>> differences({"epochs": 3, "model": "gat", "seed": 0}, {"epochs": 5, "model": None, "seed": 0})
      ['epochs: the run has 3, this call 5', 'model: the run has gat, this call the default']
    """
    others = [name for name in dict.fromkeys([*saved, *this]) if _said(saved, name) != _said(this, name)]
    if not set(others) <= _NOT_OF_THE_DATA:
        others = [name for name in others if name != "data"]  # the options listed explain the difference
    return [f"{name}: the run has {_said(saved, name)}, this call {_said(this, name)}" for name in others]


_NOT_OF_THE_DATA = {
    "data", "devices", "policy", "epochs", "steps", "seed", "batch_size", "accumulate_steps", "growth_interval",
    "learning_rate", "rules", "state_dtypes", "parameters", "fp8",
}  # fmt: skip


def _said(options: Mapping[str, Any], name: str) -> str:
    value = options.get(name)  # older runs without this option used its default
    return "the default" if value is None or value is False else str(value)


def changed_definitions(saved: Mapping[str, Any], this: Mapping[str, Any], step: int) -> tuple[str, ...]:
    """Returns a line with the definitions of a user's file that changed since a checkpoint, if any.

    Args:
      saved: metadata of the checkpoint.
      this: metadata of the current run.
      step: step of the checkpoint.

    Example:
      >>> before = {"definitions": {"file": "my.py", "loss_fn": "3f", "Net": "9a"}}
      >>> now = {"definitions": {"file": "my.py", "loss_fn": "77", "Net": "9a"}}
      >>> changed_definitions(before, now, 40)
      ('my.py has changed since step 40 was saved: loss_fn',)
    """
    before, now = (dict(metadata.get("definitions", {})) for metadata in (saved, this))
    file = now.pop("file", None)
    before.pop("file", None)
    changed = [name for name in dict.fromkeys([*before, *now]) if before.get(name) != now.get(name)]
    if not (before and changed):
        return ()
    return (f"{file} has changed since step {step} was saved: {', '.join(changed)}",)


class _BothDirections(NamedTuple):
    """A graph's sorted edges, in a form that does not depend on whether both directions share arrays."""

    by_source: CSR
    by_target: CSR


def data_digest(train: PyTree, test: PyTree, shared: PyTree = None) -> str:
    """Returns 16 hexadecimal digits of the sha256 of the data: its arrays' bytes, shapes and dtypes.

    For files that the data name, the digest covers their names below their common folder, and the sizes of up to 1,000
    of them, so that a copy elsewhere has the same digest.

    Args:
      train: tree of arrays, or of objects that are paths.
      test: likewise.
      shared: tree of arrays.
    """
    shared = change_nodes(shared, CSRAndCSC, lambda edges: _BothDirections(edges.by_source, edges.by_target))
    digest = hashlib.sha256()
    for path, leaf in named_leaves({"train": train, "test": test, "shared": shared}):
        array = np.asarray(leaf)
        digest.update(f"{path} {array.dtype} {array.shape}\n".encode())
        if array.dtype == object:
            digest.update(_facts_of_files(array.tolist()))
        else:
            digest.update(as_bytes(array).data)
    return digest.hexdigest()[:16]


def _facts_of_files(paths: Sequence[str]) -> bytes:
    folder = os.path.commonpath(paths) if paths else ""
    names = [os.path.relpath(path, folder) for path in paths]
    sizes = [str(os.path.getsize(path)) for path in paths[:: -(-len(paths) // _FILES) or 1]]
    return "\0".join(names + sizes).encode(errors="surrogateescape")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:  # imported from a folder
        return "unknown"


_RUN_FILE = "run.json"


class Stopped(Exception):
    """A run was asked to stop, and has saved.

    Attributes:
      step: number of steps done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, which is saved")
        self.step = step


class ResumeError(ValueError):
    """A run can neither begin nor resume with the existing checkpoints; nothing was trained."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """The place and times of a run's checkpoints.

    Attributes:
      store: the run's own store.
      every: steps between two checkpoints; None for one per epoch. The last step is always saved.
      resume: True to resume from the newest checkpoint; otherwise the store must be empty.
      should_stop: called once after each step; returns whether to save and stop.
    """

    store: CheckpointStore
    every: int | None = None
    resume: bool = False
    should_stop: Callable[[], bool] = lambda: False


class SavedRun(NamedTuple):
    """The saved position of a run.

    Attributes:
      done: number of steps done.
      state: the state after them.
      steps: their records.
      epochs: the records of the completed epochs.
      place: place of the next batch; None to compute it from the number of steps.
      notes: lines about changes in the task's file since then.
    """

    done: int
    state: TrainState
    steps: list[StepRecord]
    epochs: list[Epoch]
    place: DataPosition | None = None
    notes: tuple[str, ...] = ()


class Saver:
    """Saves one run: its state, the records of its steps and epochs, its place in the data, and its identity.

    It holds the store's lock from the beginning, so that no other run saves there.

    Args:
      saving: where and when to save.
      length: the length of the run.

    Raises:
      ResumeError: the store is not empty and the run does not resume.
      OSError: another run saves there; the message names it.
    """

    def __init__(self, saving: Saving, length: RunLength) -> None:
        self._saving = saving
        self._store = saving.store
        self._length = length
        self._metadata: dict[str, Any] = {}
        self._stops = False
        self._store.lock()
        if self._store.steps() and not saving.resume:
            raise ResumeError(
                f"{self._store.directory} already has checkpoints; continue with --resume, or choose another folder"
            )

    def begin(self, state: TrainState, metadata: dict[str, Any]) -> SavedRun:
        """Returns the position at which the run starts: after the newest intact step, or at its first step.

        Args:
          state: the first state of the run.
          metadata: from `run_metadata`.

        Raises:
          ResumeError: the checkpoints are of a run with other options, have no options, or none is intact.
        """
        self._metadata = metadata
        return newest_saved(self._store, state, metadata, self._length)

    def write_run_file(self) -> None:
        """Writes `run.json`, a readable copy of the metadata in every checkpoint."""
        if is_main_process():
            text = json.dumps(self._metadata, indent=1)
            write_atomically(self._store.directory / _RUN_FILE, text.encode())

    def is_due(self, step: int, *, ends_epoch: bool, is_last: bool) -> bool:
        """Returns True if the run must save after a step; called once after each, as several processes need.

        Args:
          step: number of steps done.
          ends_epoch: True if the step is the last one of its epoch, or of the run.
          is_last: True if it is the last one of the run.
        """
        every = self._saving.every
        due = ends_epoch if every is None else step % every == 0 or is_last
        self._stops = self._saving.should_stop()
        return due or self._stops

    def save(
        self,
        state: TrainState,
        steps: Sequence[StepRecord],
        epochs: Sequence[Epoch],
        place: DataPosition,
        *,
        is_last: bool,
    ) -> None:
        """Saves; raises Stopped if the run was asked to stop and is not at its end.

        Args:
          state: the state after the last step.
          steps: the records of all steps.
          epochs: the records of the completed epochs.
          place: place of the next batch.
          is_last: True at the end of the run.
        """
        step = len(steps)
        everything = _everything(state, _columns(StepRecord, steps), _columns(Epoch, epochs))
        self._store.save(step, everything, metadata={**self._metadata, "place": place._asdict()})
        if self._stops and not is_last:
            self._store.wait()
            raise Stopped(step)


def newest_saved(store: CheckpointStore, state: TrainState, metadata: dict[str, Any], length: RunLength) -> SavedRun:
    """Returns the position at which a run starts: after the newest intact step of a store.

    Args:
      store: the run's store.
      state: its first state, which is returned if nothing is saved.
      metadata: from `run_metadata`.
      length: the length of the run.

    Raises:
      ResumeError: the checkpoints are of a run with other options, have no options, or none is intact.
    """
    if not store.steps():
        return SavedRun(0, state, [], [])

    def state_for(step: int, saved: dict[str, Any]) -> dict[str, Any]:
        _check_run(store.directory, step, saved.get("run"), metadata["run"])
        # As many records as at that step.
        return _everything(state, _blank(StepRecord, step), _blank(Epoch, _epochs_over(step, saved, length)))

    try:
        step, found = store.restore_as(state_for)
    except DamagedError as error:
        raise ResumeError(str(error)) from error
    saved = store.metadata(step)
    place = DataPosition(**saved["place"]) if "place" in saved else None
    records = _records(StepRecord, found["steps"]), _records(Epoch, found["epochs"])
    return SavedRun(step, found["train"], *records, place, changed_definitions(saved, metadata, step))


def _epochs_over(step: int, saved: dict[str, Any], length: RunLength) -> int:
    if "place" in saved:
        return saved["place"]["epoch"]
    assert length.steps_per_epoch is not None  # as in version 0.1, which always knew it
    return step // length.steps_per_epoch


def _check_run(directory: Path, step: int, saved: Any, this: dict[str, Any]) -> None:
    if not isinstance(saved, dict):
        raise ResumeError(
            f"{directory} cannot be resumed: step {step} does not record its run, because an earlier version or "
            "a script saved it; choose another --checkpoint-dir"
        )
    if lines := differences(saved, this):
        raise ResumeError("\n  ".join([f"{directory} is of another run:", *lines]))


def _everything(state: TrainState, steps: dict[str, np.ndarray], epochs: dict[str, np.ndarray]) -> dict[str, Any]:
    return {"train": state, "steps": steps, "epochs": epochs}


def _columns(kind: type[Any], records: Sequence[Any]) -> dict[str, np.ndarray]:
    """Returns an array [records] for each field."""
    return {
        field.name: np.array([getattr(record, field.name) for record in records], field.type)
        for field in dataclasses.fields(kind)
    }


def _blank(kind: type[Any], count: int) -> dict[str, np.ndarray]:
    """Returns the result of `_columns` for this many records, with arbitrary values."""
    return {field.name: np.zeros(count, field.type) for field in dataclasses.fields(kind)}


def _records(kind: type[Any], columns: dict[str, np.ndarray]) -> list[Any]:
    names, rows = list(columns), zip(*(x.tolist() for x in columns.values()), strict=True)
    return [kind(**dict(zip(names, row, strict=True))) for row in rows]
