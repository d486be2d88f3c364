"""Events of a training run, as values and as JSON."""

import dataclasses
import statistics
from typing import Any

from jmp_train.steps import StepCosts
from jmp_train.tools.documents import as_json


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step.

    Attributes:
      step: from 1.
      loss: the training loss.
      grad_norm: the norm of the unscaled gradients.
      loss_scale: the scale after the step, for the next one.
      finite: True if the step was taken, False if it was skipped.
    """

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    finite: bool


@dataclasses.dataclass(frozen=True)
class Watched:
    """The results of `train_step(watch=...)` in one step.

    Attributes:
      step: from 1.
      shares: `{watch: {group: fraction}}`, as in the step's metric "watch".
    """

    step: int
    shares: dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The data are loaded, and the settings fit them.

    Attributes:
      epochs: passes over the data; 0 if only the number of steps is known.
      total: total number of steps; None if the batches have no length.
    """

    epochs: int
    total: int | None


@dataclasses.dataclass(frozen=True)
class Note:
    """A line for the user about a run without errors.

    Attributes:
      text: the line.
    """

    text: str


@dataclasses.dataclass(frozen=True)
class Warned:
    """A warning about a run's output; the run goes on.

    Attributes:
      text: a line for the user.
    """

    text: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """A run did not end well.

    Attributes:
      reason: a line for the user.
      is_wrong_call: True if the call is wrong, and nothing was trained.
    """

    reason: str
    is_wrong_call: bool = False


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The step is compiled.

    Attributes:
      seconds: time of the compilation, tracing included.
      memory_of: see `Run`.
      costs: costs of the step on any device; see `Run`.
    """

    seconds: float
    memory_of: str
    costs: StepCosts


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run with its own precision, which begins or continues.

    Attributes:
      policy: the name of its policy or AMP mode.
      start: number of steps before it.
      stop: number of steps by its end.
      costs: costs of its step on any device.
    """

    policy: str
    start: int
    stop: int
    costs: StepCosts


@dataclasses.dataclass(frozen=True)
class Progress:
    """The current state of a run.

    Attributes:
      total: total number of steps; None if the batches have no length.
      skipped_steps: number of skipped steps since the start of the run.
      recent: the steps since the last report; at least one.
      watched: the fractions of the same steps, if the run has watches.
    """

    total: int | None
    skipped_steps: int
    recent: tuple[StepRecord, ...]
    watched: tuple[Watched, ...] = ()


@dataclasses.dataclass(frozen=True)
class Epoch:
    """The report after an epoch.

    Attributes:
      epoch: from 1.
      loss: the mean training loss of the steps taken; NaN if none was.
      learning_rate: learning rate of the next step; NaN if the task does not define it.
      seconds: training time, without compilation and evaluation.
      memory_mb: peak memory so far, see `peak_memory`.
      loss_scale: loss scale of the next step.
      skipped_steps: number of skipped steps since the start of the run.
    """

    epoch: int
    loss: float
    learning_rate: float
    seconds: float
    memory_mb: float
    loss_scale: float
    skipped_steps: int


@dataclasses.dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
      policy: the name of its policy or AMP mode, or of a schedule of them.
      device: its devices, such as "cpu", "NVIDIA H200" or "8 x cpu".
      metrics: metrics of the evaluation, by name; the first one is the headline. Empty if the task has none.
      compile_seconds: time to compile the step.
      memory_of: "device" or "process", whose peak memory the epochs report.
      batch_size: examples per step; None if the batches do not determine it.
      epochs: the reports of all epochs.
      steps: the records of all steps.
      costs: costs of a step on any device; for a schedule, the mean fraction of flops in half precision, and the
        largest numbers of bytes.
      higher_is_better: True if a larger headline metric is better.
      watch: `{watch: {group: fraction}}`, the mean over the steps that this process took; empty without watches.
      rules: the file with its autocast rules; None if it used those of its policy or mode.
      phases: the phases of its schedule; empty if it has none.
    """

    policy: str
    device: str
    metrics: dict[str, float] = dataclasses.field(hash=False)
    compile_seconds: float
    memory_of: str
    batch_size: int | None
    epochs: tuple[Epoch, ...]
    steps: tuple[StepRecord, ...]
    costs: StepCosts
    higher_is_better: bool = True
    watch: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict, hash=False)
    rules: str | None = None
    phases: tuple[Phase, ...] = ()

    @property
    def epoch_seconds(self) -> float:
        """Seconds of the median epoch."""
        return statistics.median(epoch.seconds for epoch in self.epochs)

    @property
    def iterations_per_second(self) -> float:
        """Steps per second of the median epoch."""
        return len(self.steps) / len(self.epochs) / self.epoch_seconds

    @property
    def samples_per_second(self) -> float | None:
        """Examples per second of the median epoch; None if the number of examples per batch is unknown."""
        return None if self.batch_size is None else self.batch_size * self.iterations_per_second

    @property
    def headline(self) -> str | None:
        """The name of the first metric; None if there is none."""
        return next(iter(self.metrics), None)

    @property
    def memory_mb(self) -> float:
        """Peak memory of the whole run."""
        return self.epochs[-1].memory_mb

    @property
    def skipped(self) -> tuple[StepRecord, ...]:
        """The skipped steps."""
        return tuple(step for step in self.steps if not step.finite)


Event = Planned | Note | Warned | Compiled | Phase | Progress | Epoch | Run | Failed

_LEFT_OUT = ("watch", "watched", "rules", "phases")  # left out of the JSON of runs that have none


def event_to_json(event: Event) -> dict[str, Any]:
    """Returns an event as JSON data, with null for numbers that are not finite.

    Example:
      >>> event_to_json(Progress(total=330, skipped_steps=0, recent=()))
      {'event': 'progress', 'total': 330, 'skipped_steps': 0, 'recent': []}
    """
    fields = {k: v for k, v in dataclasses.asdict(event).items() if v or k not in _LEFT_OUT}
    return {"event": type(event).__name__.lower(), **as_json(fields)}
