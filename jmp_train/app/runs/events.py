"""Events of a training run, as values and as JSON; records of steps are fetched from the device now and then."""

import dataclasses
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.policies import check_progress, skips_to_floor
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.steps import StepCosts, TrainState
from jmp_train.tools.capsules import SkipRecorder
from jmp_train.tools.documents import as_json
from jmp_train.types import Metrics


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


LOOK_EVERY = 20  # steps between two fetches of the records, each of which waits for the device
LOOK_SECONDS = 0.5  # seconds between two fetches of a slow job
PATIENCE = 20  # skips in a row at the loss scale's floor before the run is given up

_KEPT = ("loss", "grad_norm", "loss_scale", "grads_finite")  # metrics kept for each step, besides "watch"


class StepRecords:
    """Fetches the metrics of the steps now and then, because each fetch waits for the device.

    Args:
      state: the state at which the run begins or resumes.
      total: steps of the run; None if it is unknown.
      steps: earlier records, if the run resumes.
      epochs: earlier records of epochs.
      on_event: called with a `Progress` for each fetch, with each `Phase` and each `Epoch`.
      recorder: recorder of skipped steps; None for none.

    Attributes:
      steps: the records of all fetched steps.
      epochs: the records of the completed epochs.
      skipped_steps: number of skipped steps.
    """

    def __init__(
        self,
        state: TrainState,
        total: int | None,
        steps: Sequence[StepRecord],
        epochs: Sequence[Epoch],
        on_event: Callable[[Event], None],
        recorder: SkipRecorder | None,
    ) -> None:
        self.steps, self.epochs = list(steps), list(epochs)
        self.skipped_steps = sum(not step.finite for step in self.steps)
        self._total, self._on_event, self._recorder = total, on_event, recorder
        self._stop_after = skips_to_floor(loss_scale_of(state.opt_state)) + PATIENCE
        self._waiting: list[Metrics] = []
        self._looked = self._epoch_began = time.perf_counter()
        self._share_totals: dict[str, dict[str, float]] = {}
        self._taken = 0  # number of steps whose fractions are in the totals

    @property
    def count(self) -> int:
        """The number of steps done."""
        return len(self.steps) + len(self._waiting)

    def begin_phase(self, state: TrainState, phase: Phase) -> None:
        """Fetches the records, and reports the phase of the next step."""
        self.look(state)
        self._on_event(phase)

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        """Records a step, and fetches the records if it is time."""
        self._waiting.append({name: metrics[name] for name in (*_KEPT, "watch") if name in metrics})
        late = time.perf_counter() - self._looked > LOOK_SECONDS
        if late or len(self._waiting) == LOOK_EVERY:
            self.look(state)

    def look(self, state: TrainState) -> None:
        """Fetches and reports the new steps; raises StalledTrainingError if all of them were skipped."""
        recent, watched = [], []
        for metrics in jax.device_get(self._waiting):
            loss, grad_norm, loss_scale = (float(metrics[name]) for name in _KEPT[:3])
            finite = bool(metrics["grads_finite"])
            number = len(self.steps) + len(recent) + 1
            recent.append(StepRecord(number, loss, grad_norm, loss_scale, finite))
            if "watch" in metrics:
                watched.append(Watched(number, jax.tree.map(float, metrics["watch"])))
                self._add_shares(watched[-1].shares, finite)
        if recent:
            self.steps += recent
            self.skipped_steps += sum(not step.finite for step in recent)
            self._on_event(Progress(self._total, self.skipped_steps, tuple(recent), tuple(watched)))
        check_progress(state.opt_state, stop_after=self._stop_after, recorder=self._recorder)
        self._waiting = []
        self._looked = time.perf_counter()

    def end_epoch(self, state: TrainState, epoch: int, steps: int, learning_rate: Callable[[int], float]) -> None:
        """Fetches the records, and records an epoch.

        Args:
          state: the state after it.
          epoch: from 1.
          steps: number of its steps.
          learning_rate: the learning rate as a function of the number of steps taken.
        """
        self.look(state)
        losses = [step.loss for step in self.steps[-steps:] if step.finite]
        self.epochs.append(
            Epoch(
                epoch=epoch,
                loss=float(np.mean(losses)) if losses else math.nan,
                learning_rate=learning_rate(len(self.steps) - self.skipped_steps),
                seconds=time.perf_counter() - self._epoch_began,
                memory_mb=peak_memory()[0],
                loss_scale=self.steps[-1].loss_scale,
                skipped_steps=self.skipped_steps,
            )
        )
        self._on_event(self.epochs[-1])

    def begin_epoch(self) -> None:
        """Starts the clock of an epoch, after the last one was saved."""
        self._epoch_began = time.perf_counter()

    @property
    def mean_shares(self) -> dict[str, dict[str, float]]:
        """The mean fraction of each group under each watch over the steps taken; 0 if none was."""
        return jax.tree.map(lambda total: total / max(self._taken, 1), self._share_totals)

    def _add_shares(self, shares: dict[str, dict[str, float]], taken: bool) -> None:
        self._taken += taken
        totals = self._share_totals or jax.tree.map(lambda share: 0.0, shares)
        self._share_totals = jax.tree.map(lambda total, share: total + share * taken, totals, shares)


def peak_memory() -> tuple[float, str]:
    """Returns the peak memory in MB (10**6 bytes) so far, and "device" or "process".

    CPUs report no device memory; there, the largest resident size of the process counts, data and
    compiler included. With several devices, the largest peak counts.

    Example:
      >>> megabytes, whose = peak_memory()
      >>> megabytes > 0
      True
    """
    statistics = [device.memory_stats() or {} for device in jax.local_devices()]
    peak = max(device.get("peak_bytes_in_use", 0) for device in statistics)
    if peak:
        return peak / 1e6, "device"
    import resource  # not available on Windows, where jax has no GPU anyway

    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (resident if sys.platform == "darwin" else resident * 1024) / 1e6, "process"
