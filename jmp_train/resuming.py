"""Runs of the command line that save as they go, stop on a signal, and go on where they were."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jmp_train.checkpoint import CheckpointStore
from jmp_train.records import Epoch, Step
from jmp_train.train_state import TrainState
from jmp_train.whole_files import write_whole

_OPTIONS_FILE = "run.json"


class Stopped(Exception):
    """A run was asked to stop, and has saved.

    Attributes:
      step: how many steps are done.
    """

    def __init__(self, step: int) -> None:
        super().__init__(f"stopped after step {step}, which is saved")
        self.step = step


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
    """Saves one run: its state, its steps' and epochs' records.

    Args:
      saving: see there.
      options: of the run, all that its numbers depend on; as JSON.
      total: how many steps the run has.
      steps_per_epoch: how many an epoch has.

    Raises:
      ValueError: the store is not empty and the run is not to go on, or the options are not those of the run
        that it has.
    """

    def __init__(
        self, saving: Saving, options: dict[str, Any], total: int, steps_per_epoch: int
    ) -> None:
        self._saving = saving
        self._total = total
        self._steps_per_epoch = steps_per_epoch
        self._every = steps_per_epoch if saving.every is None else saving.every
        directory = saving.store.directory
        if saving.store.steps() and not saving.resume:
            raise ValueError(
                f"{directory} has checkpoints already: go on with --resume, or take another"
            )
        _check_options(directory / _OPTIONS_FILE, options, new=not saving.store.steps())

    def restore(self, state: TrainState) -> tuple[int, TrainState, list[Step], list[Epoch]]:
        """Returns how many steps are done, the state after them, and their records."""
        blank = {"train": state, "steps": self._steps([]), "epochs": self._epochs([])}
        try:
            done, found = self._saving.store.restore(blank)
        except FileNotFoundError:
            return 0, state, [], []
        steps = _records(Step, found["steps"], done)
        epochs = _records(Epoch, found["epochs"], done // self._steps_per_epoch)
        return done, found["train"], steps, epochs

    def is_due(self, step: int) -> bool:
        """Returns whether to save after a step."""
        return step % self._every == 0 or step == self._total or self._saving.should_stop()

    def save(self, state: TrainState, steps: Sequence[Step], epochs: Sequence[Epoch]) -> None:
        """Saves; raises Stopped if the run was asked to stop and is not at its end."""
        step = len(steps)
        everything = {"train": state, "steps": self._steps(steps), "epochs": self._epochs(epochs)}
        self._saving.store.save(step, everything)
        if self._saving.should_stop() and step < self._total:
            self._saving.store.wait()
            raise Stopped(step)

    def _steps(self, steps: Sequence[Step]) -> dict[str, np.ndarray]:
        return _columns(Step, steps, self._total)

    def _epochs(self, epochs: Sequence[Epoch]) -> dict[str, np.ndarray]:
        return _columns(Epoch, epochs, self._total // self._steps_per_epoch)


def _columns(kind: type[Any], records: Sequence[Any], length: int) -> dict[str, np.ndarray]:
    """Returns an array [length] for each field, zero where there is no record yet."""
    columns = {}
    for field in dataclasses.fields(kind):
        columns[field.name] = np.zeros(length, field.type)
        columns[field.name][: len(records)] = [getattr(record, field.name) for record in records]
    return columns


def _records(kind: type[Any], columns: dict[str, np.ndarray], count: int) -> list[Any]:
    return [
        kind(**{name: column[row].item() for name, column in columns.items()})
        for row in range(count)
    ]


def _check_options(file: Path, options: dict[str, Any], *, new: bool) -> None:
    """Writes a new run's options; raises ValueError where those of a run that goes on are others."""
    if new or not file.exists():
        write_whole(file, json.dumps(options, indent=1).encode())
        return
    saved = json.loads(file.read_text())
    lines = [
        f"{name}: the run has {saved.get(name)}, this call {value}"
        for name, value in options.items()
        if saved.get(name) != value
    ]
    if lines:
        raise ValueError(f"{file.parent} is of another run: {'; '.join(lines)}")
