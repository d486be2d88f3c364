"""Trials: which operations run in float32, tested on examples by one compiled program."""

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from jmp_train.tuning.tolerance import Errors, Tolerance, as_numbers


class Trial(NamedTuple):
    """A choice, and what came of it.

    Attributes:
      float32: the numbers of the units that ran in float32.
      passed: whether the errors were tolerated on all examples.
      errors: of the worst example that was tried.
      half_flops: the share of the units' flops that ran in half precision.
    """

    float32: frozenset[int]
    passed: bool
    errors: Errors
    half_flops: float


class BudgetSpent(Exception):
    """All trials that were allowed have been made."""


class Trials:
    """Makes trials, each choice once, and remembers the best.

    Args:
      run: `run(flags, loss scale, example number)` -> errors.
      scale: of the loss, in the first trials.
      examples: how many there are.
      flops: [units], of each.
      tolerance: of the errors.
      budget: how many trials may be made.
      progress: called with the number of trials so far and what the last one gave.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray, float, int], Errors],
        scale: float,
        examples: int,
        flops: np.ndarray,
        tolerance: Tolerance,
        budget: int,
        progress: Callable[[int, str], None] | None,
    ) -> None:
        self._run = run
        self.scale = scale
        self._order = list(range(examples))
        self._flops = flops
        self._tolerance = tolerance
        self._budget = budget
        self._progress = progress
        self.seconds = 0.0
        self.count = 0
        self._made: dict[float, dict[frozenset[int], Trial]] = {}

    def rescale(self, scale: float) -> None:
        """Goes on with another loss scale, and with what was tried with it.

        Args:
          scale: of the loss.
        """
        self.scale = scale

    @property
    def made(self) -> dict[frozenset[int], Trial]:
        """The trials with the loss scale, by what was float32."""
        return self._made.setdefault(self.scale, {})

    def settle(self, scales: Sequence[float], float32: frozenset[int]) -> None:
        """Goes on with the loss scale where a dynamic one settles: the largest with which all is finite.

        If none is found, the loss scale stays as it is.

        Args:
          scales: to choose from, the largest first; those above the present one are left out.
          float32: units that run in float32.
        """
        first = self.scale
        try:
            for self.scale in (scale for scale in scales if scale <= first):
                if self(float32).errors.finite:
                    return
        except BudgetSpent:
            pass
        self.scale = first

    @property
    def best(self) -> Trial | None:
        """The trial that passed with the fewest units in float32."""
        passed = [trial for trial in self.made.values() if trial.passed]
        return min(passed, key=lambda trial: len(trial.float32), default=None)

    def __call__(self, float32: frozenset[int]) -> Trial:
        """Returns what comes of running units in float32 and all others in half precision."""
        if float32 in self.made:
            return self.made[float32]
        if self.count >= self._budget:
            raise BudgetSpent
        began = time.perf_counter()
        trial = self._try(float32)
        self.seconds += time.perf_counter() - began
        self.made[float32] = trial
        self.count += 1
        if self._progress is not None:
            best = self.best
            kept = "none yet" if best is None else f"{len(best.float32)} of {len(self._flops)} in float32"
            self._progress(self.count, kept)
        return trial

    def suffices(self, float32: frozenset[int]) -> bool:
        """Whether errors are tolerated if these units run in float32."""
        return self(float32).passed

    def _try(self, float32: frozenset[int]) -> Trial:
        flags = np.ones(len(self._flops), bool)
        flags[list(float32)] = False
        worst: Errors | None = None
        passed = True
        for place, number in enumerate(self._order):
            errors = as_numbers(self._run(flags, self.scale, number))
            passed = self._tolerance.passes(errors)
            if worst is None or not passed or errors.gradient > worst.gradient:
                worst = errors
            if not passed:
                self._order.insert(0, self._order.pop(place))  # the hardest example first, the next time
                break
        assert worst is not None
        share = float(self._flops[flags].sum() / max(1.0, self._flops.sum()))
        return Trial(float32, passed, worst, share)


def front_of(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Returns the trials of which no other has both a larger share in half precision and a smaller gradient error."""
    front: list[Trial] = []
    finite = [trial for trial in trials if trial.errors.finite]
    for trial in sorted(finite, key=lambda t: (-t.half_flops, t.errors.gradient, len(t.float32))):
        if not front or trial.errors.gradient < front[-1].errors.gradient:
            front.append(trial)
    return tuple(front)
