"""The records of a run's steps and epochs, fetched from the device now and then."""

import math
import sys
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jmp_train.app.runs.events import Epoch, Event, Phase, Progress, StepRecord, Watched
from jmp_train.policies import check_progress, skips_to_floor
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.steps import TrainState
from jmp_train.tools.capsules import SkipRecorder
from jmp_train.types import Metrics

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
