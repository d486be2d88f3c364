"""The records of a run's steps and epochs, fetched from the device now and then."""

import math
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jmp_train.capsules import SkipRecorder
from jmp_train.policies.optimizers import check_progress, loss_scale_of, skips_to_floor
from jmp_train.runs.events import Epoch, Event, Phase, Progress, Step, Watched
from jmp_train.runs.memory import peak_memory
from jmp_train.steps import TrainState
from jmp_train.types import Metrics

LOOK_EVERY = 20  # steps between two looks at the skips, each of which waits for the device
LOOK_SECONDS = 0.5  # and the time after which a slow job is looked at all the same
PATIENCE = 20  # skips in a row at the loss scale's floor until the run is given up

_KEPT = ("loss", "grad_norm", "loss_scale", "grads_finite")  # of the metrics of each step, and "watch"


class StepRecords:
    """Fetches the steps' metrics now and then, because each time waits for the device.

    Args:
      state: where the run begins or goes on.
      total: steps of the run; None if it is unknown.
      steps: the records of before, if the run goes on.
      epochs: those of its epochs.
      on_event: called with a `Progress` for each look, with each `Phase` and each `Epoch`.
      recorder: of skipped steps; None for none.

    Attributes:
      steps: the records of all steps that were looked at.
      epochs: those of the epochs that are over.
      skipped_steps: how many of the steps were skipped.
    """

    def __init__(
        self,
        state: TrainState,
        total: int | None,
        steps: Sequence[Step],
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
        self._taken = 0  # of the steps whose shares are in the totals

    @property
    def count(self) -> int:
        """How many steps are done."""
        return len(self.steps) + len(self._waiting)

    def begin_phase(self, state: TrainState, phase: Phase) -> None:
        """Looks, and reports the phase of the next step."""
        self.look(state)
        self._on_event(phase)

    def after_step(self, state: TrainState, metrics: Metrics) -> None:
        """Takes note of a step, and looks if it is time."""
        self._waiting.append({name: metrics[name] for name in (*_KEPT, "watch") if name in metrics})
        late = time.perf_counter() - self._looked > LOOK_SECONDS
        if late or len(self._waiting) == LOOK_EVERY:
            self.look(state)

    def look(self, state: TrainState) -> None:
        """Reports the steps since the last look; raises StalledTrainingError if all are skipped."""
        recent, watched = [], []
        for metrics in jax.device_get(self._waiting):
            loss, grad_norm, loss_scale = (float(metrics[name]) for name in _KEPT[:3])
            finite = bool(metrics["grads_finite"])
            number = len(self.steps) + len(recent) + 1
            recent.append(Step(number, loss, grad_norm, loss_scale, finite))
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
        """Looks, and records an epoch.

        Args:
          state: after it.
          epoch: from 1.
          steps: how many it had.
          learning_rate: by the number of steps that were taken.
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
        """The mean share of each group under each watch over the steps that were taken; 0 if none was."""
        return jax.tree.map(lambda total: total / max(self._taken, 1), self._share_totals)

    def _add_shares(self, shares: dict[str, dict[str, float]], taken: bool) -> None:
        self._taken += taken
        totals = self._share_totals or jax.tree.map(lambda share: 0.0, shares)
        self._share_totals = jax.tree.map(lambda total, share: total + share * taken, totals, shares)
