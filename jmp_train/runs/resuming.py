"""Saving and resuming runs of the command line: periodic checkpoints, stop on a signal."""

import dataclasses
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.checkpoints import CheckpointStore, DamagedError
from jmp_train.policies.files import write_atomically
from jmp_train.runs.events import Epoch, Step
from jmp_train.runs.run_identity import differences
from jmp_train.steps import TrainState

_RUN_FILE = "run.json"


class Stopped(Exception):
    """A run was asked to stop, and has saved.

    Attributes:
      step: how many steps are done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, which is saved")
        self.step = step


class ResumeError(ValueError):
    """A run can neither begin nor go on with the checkpoints that are there; nothing was trained."""


@dataclasses.dataclass(frozen=True)
class Saving:
    """Where a run saves, and when.

    Attributes:
      store: the run's own.
      every: steps between two checkpoints; None for one an epoch. The last step is always saved.
      resume: whether to go on from what the store has; else it has to be empty.
      should_stop: asked after each step whether to save and stop.
    """

    store: CheckpointStore
    every: int | None = None
    resume: bool = False
    should_stop: Callable[[], bool] = lambda: False


class Saver:
    """Saves one run: its state, its steps' and epochs' records, and whose they are.

    It has the store's lock from the beginning, so that no other run saves there.

    Args:
      saving: see there.
      total: how many steps the run has.
      steps_per_epoch: how many an epoch has.

    Raises:
      ResumeError: the store is not empty and the run is not to go on.
      OSError: another run saves there; the message says which.
    """

    def __init__(self, saving: Saving, total: int, steps_per_epoch: int) -> None:
        self._saving = saving
        self._store = saving.store
        self._total = total
        self._steps_per_epoch = steps_per_epoch
        self._every = steps_per_epoch if saving.every is None else saving.every
        self._metadata: dict[str, Any] = {}
        self._store.lock()
        if self._store.steps() and not saving.resume:
            raise ResumeError(f"{self._store.directory} has checkpoints already: go on with --resume, or take another")

    def begin(self, state: TrainState, metadata: dict[str, Any]) -> tuple[int, TrainState, list[Step], list[Epoch]]:
        """Returns how many steps are done, the state after them, and their records, of the newest intact step.

        Writes `run.json`, which says to people what every checkpoint says as well.

        Args:
          state: the run's first.
          metadata: what `run_metadata` returns.

        Raises:
          ResumeError: the checkpoints are of a run with other options, or do not say of which, or none is intact.
        """
        self._metadata = metadata
        found = newest_saved(self._store, state, metadata, self._steps_per_epoch)
        run_file = self._store.directory / _RUN_FILE
        if found[0]:
            _check_run_file(run_file, metadata)
        write_atomically(run_file, json.dumps(metadata, indent=1).encode())
        return found

    def is_due(self, step: int) -> bool:
        """Returns whether to save after a step."""
        return step % self._every == 0 or step == self._total or self._saving.should_stop()

    def save(self, state: TrainState, steps: Sequence[Step], epochs: Sequence[Epoch]) -> None:
        """Saves; raises Stopped if the run was asked to stop and is not at its end."""
        step = len(steps)
        everything = _everything(state, _columns(Step, steps), _columns(Epoch, epochs))
        self._store.save(step, everything, metadata=self._metadata)
        if self._saving.should_stop() and step < self._total:
            self._store.wait()
            raise Stopped(step)


def newest_saved(
    store: CheckpointStore, state: TrainState, metadata: dict[str, Any], steps_per_epoch: int
) -> tuple[int, TrainState, list[Step], list[Epoch]]:
    """Returns how many steps of a run are done, the state after them, and their records, of the newest intact step.

    Args:
      store: the run's.
      state: its first, which is returned where nothing is saved.
      metadata: what `run_metadata` returns.
      steps_per_epoch: how many an epoch has.

    Raises:
      ResumeError: the checkpoints are of a run with other options, or do not say of which, or none is intact.
    """
    if not store.steps():
        return 0, state, [], []

    def state_for(step: int, saved: dict[str, Any]) -> dict[str, Any]:
        _check_run(store.directory, step, saved.get("run"), metadata["run"])
        # As many records as there were then.
        return _everything(state, _blank(Step, step), _blank(Epoch, step // steps_per_epoch))

    try:
        step, found = store.restore_as(state_for)
    except DamagedError as error:
        raise ResumeError(str(error)) from error
    return step, found["train"], _records(Step, found["steps"]), _records(Epoch, found["epochs"])


def _check_run(directory: Path, step: int, saved: Any, this: dict[str, Any]) -> None:
    if not isinstance(saved, dict):
        raise ResumeError(
            f"{directory} cannot be gone on from: step {step} does not say of which run it is, as those of "
            "earlier versions, or of a script; take another --checkpoint-dir"
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
    """Returns what `_columns` returns of so many records, but for their values."""
    return {field.name: np.zeros(count, field.type) for field in dataclasses.fields(kind)}


def _records(kind: type[Any], columns: dict[str, np.ndarray]) -> list[Any]:
    names, rows = list(columns), zip(*(x.tolist() for x in columns.values()), strict=True)
    return [kind(**dict(zip(names, row, strict=True))) for row in rows]


def _check_run_file(file: Path, metadata: dict[str, Any]) -> None:
    """Warns if the file of a run that goes on does not say what its checkpoints say, which count."""
    try:
        saved = json.loads(file.read_bytes())
        lines = differences(saved["run"], metadata["run"])
    except FileNotFoundError:
        return
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        reason = f"it is not what a run writes ({type(error).__name__}: {error})"
    else:
        reason = f"it is of another run ({'; '.join(lines)})"
        if not lines:
            return
    warnings.warn(
        f"{file} is written again: {reason}; the checkpoints beside it are of this run",
        stacklevel=3,
    )
