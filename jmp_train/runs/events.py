"""Events of a training run, as values and as JSON."""

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

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
      epochs: passes over the data.
      total: how many steps there will be.
    """

    epochs: int
    total: int


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
      total: how many steps there will be.
      skipped_steps: since the start of the run.
      recent: the steps since the last look; at least one.
      watched: the shares of the same steps, if the run watches.
    """

    total: int
    skipped_steps: int
    recent: tuple[Step, ...]
    watched: tuple[Watched, ...] = ()


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What is reported after an epoch.

    Attributes:
      epoch: from 1.
      loss: the mean training loss of the steps that were taken; NaN if none was.
      learning_rate: that of the next step.
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
      test_accuracy: from 0 to 1; an output that is not finite is a wrong one.
      compile_seconds: what compiling the step took.
      memory_of: whose peak memory the epochs report, "device" or "process".
      batch_size: examples a step.
      epochs: all of them.
      steps: all of them.
      costs: what a step costs on any device; of a schedule the mean share of flops in half, and the largest numbers of
        bytes.
      nonfinite_outputs: for how many of the test data's labels the model's output is not finite.
      bits_per_byte: the mean of -log2 of the test labels' probabilities, where the output is finite; None for tasks
        whose labels are not bytes.
      watch: `{watch: {group: share}}`, the mean over the steps that this process took; empty if it watched nothing.
      rules: the file of the rules by which it autocast; None for its policy's or mode's own.
      phases: those of its schedule; empty if it has none.
    """

    policy: str
    device: str
    test_accuracy: float
    compile_seconds: float
    memory_of: str
    batch_size: int
    epochs: tuple[Epoch, ...]
    steps: tuple[Step, ...]
    costs: StepCosts
    nonfinite_outputs: int = 0
    watch: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict, hash=False)
    rules: str | None = None
    bits_per_byte: float | None = None
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
    def samples_per_second(self) -> float:
        """The median epoch's examples a second."""
        return self.batch_size * self.iterations_per_second

    @property
    def memory_mb(self) -> float:
        """Peak memory of the whole run."""
        return self.epochs[-1].memory_mb

    @property
    def skipped(self) -> tuple[Step, ...]:
        """The steps that were skipped."""
        return tuple(step for step in self.steps if not step.finite)


Event = Planned | Compiled | Phase | Progress | Epoch | Run

_KINDS: dict[str, type[Event]] = {
    "planned": Planned,
    "compiled": Compiled,
    "phase": Phase,
    "progress": Progress,
    "epoch": Epoch,
    "run": Run,
}
_NAMES = {kind: name for name, kind in _KINDS.items()}
_PARTS = {"epochs": Epoch, "recent": Step, "steps": Step, "watched": Watched, "phases": Phase}
_LEFT_OUT = ("watch", "watched", "rules", "bits_per_byte", "phases")  # of runs that have none


def event_to_json(event: Event) -> dict[str, Any]:
    """Returns an event as JSON has it; numbers that are not finite become null.

    Example:
      >>> event_to_json(Progress(total=330, skipped_steps=0, recent=()))
      {'event': 'progress', 'total': 330, 'skipped_steps': 0, 'recent': []}
    """
    fields = {k: v for k, v in dataclasses.asdict(event).items() if v or k not in _LEFT_OUT}
    return {"event": _NAMES[type(event)], **finite_or_none(fields)}


def event_from_json(fields: dict[str, Any]) -> Event:
    """Returns the event that `event_to_json` made `fields` of; null becomes NaN."""
    return _revive(_KINDS[fields["event"]], {k: v for k, v in fields.items() if k != "event"})


def finite_or_none(value: Any) -> Any:
    """Returns JSON content with None in place of numbers that are not finite."""
    if isinstance(value, dict):
        return {name: finite_or_none(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(x) for x in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _revive(kind: Callable[..., Any], fields: dict[str, Any]) -> Any:
    values: dict[str, Any] = {}
    for name, value in fields.items():
        if isinstance(value, list):
            values[name] = tuple(_revive(_PARTS[name], part) for part in value)
        elif name == "costs":
            values[name] = StepCosts(**value)
        else:
            values[name] = math.nan if value is None else value
    return kind(**values)
