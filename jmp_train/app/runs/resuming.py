"""Saving and resuming runs of the command line: periodic checkpoints, stop on a signal."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jmp_train.app.runs.events import Epoch, StepRecord
from jmp_train.app.runs.run_identity import changed_definitions, differences
from jmp_train.app.runs.run_settings import RunLength
from jmp_train.app.runs.task_batches import DataPosition
from jmp_train.checkpoints import CheckpointStore, DamagedError
from jmp_train.distributed import is_main_process
from jmp_train.policies.files import write_atomically
from jmp_train.steps import TrainState

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
