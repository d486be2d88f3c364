"""Trials of operations in float32 by one compiled program, and the search for a smallest choice that suffices.

The search does not depend on precision: a test function returns whether a set of items suffices.
"""

import math
import time
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from jmp_train.tools.tuning.tolerance import Errors, Tolerance, as_numbers


class Trial(NamedTuple):
    """A choice of units in float32, and its errors.

    Attributes:
      float32: numbers of the units that ran in float32.
      passed: True if the errors were tolerated on all examples.
      errors: errors of the worst example that was tried.
    """

    float32: frozenset[int]
    passed: bool
    errors: Errors


class BudgetSpent(Exception):
    """Raised when the budget of trials is used up."""


class Trials:
    """Tries each choice once, and remembers the best.

    Args:
      run: `run(flags, loss scale, example number)` -> errors.
      scale: loss scale of the first trials; set `scale` to continue with another and the trials made with it.
      examples: number of examples.
      units: number of units.
      tolerance: tolerance of the errors.
      budget: maximum number of trials.
      progress: called with the number of trials so far and a text about the best one.
      kept: the precision of kept units, for that text.
    """

    def __init__(
        self,
        run: Callable[[np.ndarray, float, int], Errors],
        scale: float,
        examples: int,
        units: int,
        tolerance: Tolerance,
        budget: int,
        progress: Callable[[int, str], None] | None,
        kept: str = "float32",
    ) -> None:
        self._run = run
        self.scale = scale
        self._order = list(range(examples))
        self._units = units
        self.tolerance = tolerance
        self._budget = budget
        self._progress = progress
        self._kept = kept
        self.seconds = 0.0
        self.count = 0
        self._made: dict[float, dict[frozenset[int], Trial]] = {}

    @property
    def made(self) -> dict[frozenset[int], Trial]:
        """The trials with the present loss scale, by units in float32."""
        return self._made.setdefault(self.scale, {})

    def settle(self, scales: Sequence[float], float32: frozenset[int]) -> None:
        """Sets the loss scale at which a dynamic one settles: the largest with finite results and gradients.

        If there is none, the loss scale stays unchanged.

        Args:
          scales: loss scales to choose from, the largest first. Those above the present one are ignored.
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
        """The passing trial with the fewest units in float32, or None."""
        passed = [trial for trial in self.made.values() if trial.passed]
        return min(passed, key=lambda trial: len(trial.float32), default=None)

    def __call__(self, float32: frozenset[int]) -> Trial:
        """Returns the trial with these units in float32 and all others in half precision."""
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
            kept = "none yet" if best is None else f"{len(best.float32)} of {self._units} in {self._kept}"
            self._progress(self.count, kept)
        return trial

    def suffices(self, float32: frozenset[int]) -> bool:
        """Returns True if the errors are tolerated with these units in float32."""
        return self(float32).passed

    def _try(self, float32: frozenset[int]) -> Trial:
        flags = np.ones(self._units, bool)
        flags[list(float32)] = False
        worst: Errors | None = None
        passed = True
        for place, number in enumerate(self._order):
            errors = as_numbers(self._run(flags, self.scale, number))
            passed = self.tolerance.passes(errors)
            if worst is None or not passed or errors.gradient > worst.gradient:
                worst = errors
            if not passed:
                self._order.insert(0, self._order.pop(place))  # the hardest example first, the next time
                break
        assert worst is not None
        return Trial(float32, passed, worst)


Item = TypeVar("Item", bound=Hashable)
Suffices = Callable[[frozenset[Item]], bool]


def smallest_list(
    ranking: Sequence[Item],
    is_costly: Callable[[Item], bool],
    group_of: Callable[[Item], Hashable],
    suffices: Suffices[Item],
) -> list[Item]:
    """Returns items that suffice and are all needed: without any of them, the others do not suffice.

    Costly items are included only if all others together do not suffice.

    Args:
      ranking: all items, those most likely to be needed first; together they must suffice.
      is_costly: returns True for items to avoid.
      group_of: returns the group of an item; groups are tried as a whole first.
      suffices: deterministic test of a set of items.

    Example:
      >>> smallest_list(range(100), lambda i: i < 50, lambda i: i // 10, lambda items: {3, 72} <= items)
      [72, 3]

    Reference: delta debugging, of Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", IEEE
    TSE 28(2), 2002.
    """
    if suffices(frozenset()):
        return []
    costly = [item for item in ranking if is_costly(item)]
    cheap = [item for item in ranking if not is_costly(item)]
    with_cheap = _smallest(costly, group_of, lambda items: suffices(items.union(cheap)))
    with_costly = _smallest(cheap, group_of, lambda items: suffices(items.union(with_cheap)))
    return needed([*with_costly, *with_cheap], suffices)


def _smallest(ranking: Sequence[Item], group_of: Callable[[Item], Hashable], suffices: Suffices[Item]) -> list[Item]:
    if suffices(frozenset()):
        return []
    kept = _first_that_suffice(ranking, suffices)
    groups: dict[Hashable, list[Item]] = {}
    for item in kept:
        groups.setdefault(group_of(item), []).append(item)

    def groups_suffice(names: frozenset[Hashable]) -> bool:
        return suffices(frozenset(item for name in names for item in groups[name]))

    names = needed(list(groups), groups_suffice)
    in_groups = {item for name in names for item in groups[name]}
    return needed([item for item in kept if item in in_groups], suffices)


def first_needed(ranking: Sequence[Item], suffices: Suffices[Item]) -> list[Item]:
    """Returns items that suffice and are all needed, as `smallest_list`, but first ones even if fewer others suffice.

    Args:
      ranking: all items, those to keep first; together they must suffice.
      suffices: deterministic test of a set of items.

    Example:
      >>> first_needed("abcd", lambda items: {"a", "b", "c"} <= items or {"c", "d"} <= items)
      ['a', 'b', 'c']
    """
    return needed(_first_that_suffice(ranking, suffices), suffices, size=1) if not suffices(frozenset()) else []


def needed(items: Sequence[Item], suffices: Suffices[Item], size: int | None = None) -> list[Item]:
    """Returns a sufficient subset of the items in which every item is necessary.

    Args:
      items: items that suffice together; the search tries to remove the last ones first.
      suffices: see `smallest_list`.
      size: the number of items that it tries to remove at once in the beginning; None for half of them.
    """
    kept, size = list(items), size or max(1, len(items) // 2)
    while True:
        before, end = len(kept), len(kept)
        while end > 0:
            rest = kept[: max(0, end - size)] + kept[end:]
            if suffices(frozenset(rest)):
                kept = rest
            end = max(0, end - size)
        if size > 1:
            size = math.ceil(size / 2)
        elif len(kept) == before:
            return kept


def _first_that_suffice(ranking: Sequence[Item], suffices: Suffices[Item]) -> list[Item]:
    """Returns the first 1, 2, 4, ... items: the smallest such prefix that suffices."""
    count = 1
    while count < len(ranking) and not suffices(frozenset(ranking[:count])):
        count *= 2
    return list(ranking[:count])
