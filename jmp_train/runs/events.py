"""Events of a training run, as values and as JSON."""

import dataclasses
import math
import statistics
import typing
from collections.abc import Callable
from typing import Any

from jmp_train.policies.documents import as_json
from jmp_train.steps import StepCosts


@dataclasses.dataclass(frozen=True)
class Step:
    """One step.

    Attributes:
      step: from 1.
      loss: the training loss.
      grad_norm: the norm of the unscaled gradients.
      loss_scale: the scale that the step left to the next one.
      finite: whether the step was taken; else it was skipped.
    """

    step: int
    loss: float
    grad_norm: float
    loss_scale: float
    finite: bool


@dataclasses.dataclass(frozen=True)
class Watched:
    """What `train_step(watch=...)` found in one step.

    Attributes:
      step: from 1.
      shares: `{watch: {group: share}}`, as the step's metric "watch".
    """

    step: int
    shares: dict[str, dict[str, float]]


@dataclasses.dataclass(frozen=True)
class Planned:
    """The data is there and the call fits it.

    Attributes:
      epochs: passes over the data; 0 if only the number of steps is known.
      total: how many steps there will be; None if the batches have no length.
    """

    epochs: int
    total: int | None


@dataclasses.dataclass(frozen=True)
class Note:
    """A line for the user about a run that goes well.

    Attributes:
      text: the line.
    """

    text: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The step is compiled.

    Attributes:
      seconds: what that took, tracing included.
      memory_of: see `Run`.
      costs: what the step costs on any device; see `Run`.
    """

    seconds: float
    memory_of: str
    costs: StepCosts


@dataclasses.dataclass(frozen=True)
class Phase:
    """A part of a run with a precision of its own, which begins or goes on.

    Attributes:
      policy: the name of its policy or AMP mode.
      start: how many steps are done before the first of it.
      stop: how many are done after the last of it.
      costs: what a step of it costs on any device.
    """

    policy: str
    start: int
    stop: int
    costs: StepCosts


@dataclasses.dataclass(frozen=True)
class Progress:
    """Where a run is now.

    Attributes:
      total: how many steps there will be; None if the batches have no length.
      skipped_steps: since the start of the run.
      recent: the steps since the last look; at least one.
      watched: the shares of the same steps, if the run watches.
    """

    total: int | None
    skipped_steps: int
    recent: tuple[Step, ...]
    watched: tuple[Watched, ...] = ()


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What is reported after an epoch.

    Attributes:
      epoch: from 1.
      loss: the mean training loss of the steps that were taken; NaN if none was.
      learning_rate: that of the next step; NaN if the task does not say it.
      seconds: of training, without compilation and evaluation.
      memory_mb: peak memory so far, see `peak_memory`.
      loss_scale: that of the next step.
      skipped_steps: since the start of the run.
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
      device: what it ran on, such as "cpu", "NVIDIA H200" or, of several, "8 x cpu".
      metrics: of the evaluation, by name; the first one is the headline. Empty if the task has none.
      compile_seconds: what compiling the step took.
      memory_of: whose peak memory the epochs report, "device" or "process".
      batch_size: examples per step; None if the batches do not say it.
      epochs: all of them.
      steps: all of them.
      costs: what a step costs on any device; of a schedule the mean share of flops in half, and the largest numbers of
        bytes.
      higher_is_better: True if a larger headline metric is better.
      watch: `{watch: {group: share}}`, the mean over the steps that this process took; empty if it watched nothing.
      rules: the file of the rules by which it autocast; None for its policy's or mode's own.
      phases: those of its schedule; empty if it has none.
    """

    policy: str
    device: str
    metrics: dict[str, float] = dataclasses.field(hash=False)
    compile_seconds: float
    memory_of: str
    batch_size: int | None
    epochs: tuple[Epoch, ...]
    steps: tuple[Step, ...]
    costs: StepCosts
    higher_is_better: bool = True
    watch: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict, hash=False)
    rules: str | None = None
    phases: tuple[Phase, ...] = ()

    @property
    def epoch_seconds(self) -> float:
        """The median epoch's."""
        return statistics.median(epoch.seconds for epoch in self.epochs)

    @property
    def iterations_per_second(self) -> float:
        """The median epoch's steps a second."""
        return len(self.steps) / len(self.epochs) / self.epoch_seconds

    @property
    def samples_per_second(self) -> float | None:
        """The median epoch's examples a second; None if the batches do not say how many they have."""
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
    def skipped(self) -> tuple[Step, ...]:
        """The steps that were skipped."""
        return tuple(step for step in self.steps if not step.finite)


Event = Planned | Note | Compiled | Phase | Progress | Epoch | Run

_KINDS: dict[str, type[Event]] = {kind.__name__.lower(): kind for kind in typing.get_args(Event)}
_PARTS = {"epochs": Epoch, "recent": Step, "steps": Step, "watched": Watched, "phases": Phase}
_LEFT_OUT = ("watch", "watched", "rules", "phases")  # of runs that have none
_OF_0_1 = ("test_accuracy", "nonfinite_outputs", "bits_per_byte")  # metrics that were fields of a run in version 0.1


def event_to_json(event: Event) -> dict[str, Any]:
    """Returns an event as JSON has it; numbers that are not finite become null.

    Example:
      >>> event_to_json(Progress(total=330, skipped_steps=0, recent=()))
      {'event': 'progress', 'total': 330, 'skipped_steps': 0, 'recent': []}
    """
    fields = {k: v for k, v in dataclasses.asdict(event).items() if v or k not in _LEFT_OUT}
    fields |= metrics_of_0_1(event) if isinstance(event, Run) else {}
    return {"event": type(event).__name__.lower(), **as_json(fields)}


def metrics_of_0_1(run: Run) -> dict[str, float]:
    """Returns the metrics that have keys of their own in JSON since version 0.1.

    Args:
      run: the run.
    """
    return {name: run.metrics[name] for name in _OF_0_1 if name in run.metrics}


def event_from_json(fields: dict[str, Any]) -> Event:
    """Returns the event that `event_to_json` made `fields` of; null becomes NaN."""
    return _revive(_KINDS[fields["event"]], {k: v for k, v in fields.items() if k not in ("event", *_OF_0_1)})


def _revive(kind: Callable[..., Any], fields: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, list):
            values[name] = tuple(_revive(_PARTS[name], part) for part in value)
        elif name == "costs":
            values[name] = StepCosts(**value)
        elif name in ("total", "batch_size"):
            values[name] = value
        elif name == "metrics":
            values[name] = {metric: math.nan if x is None else x for metric, x in value.items()}
        else:
            values[name] = math.nan if value is None else value
    return kind(**values)
