"""The measurements of a diagnosis and their relations: readers of a row, the order of events, and reachable results."""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from jmp_train.tools.diagnosing.arithmetic import picks
from jmp_train.tools.diagnosing.equations import Direction, Site
from jmp_train.tools.diagnosing.measures import COLUMNS
from jmp_train.tools.diagnosing.operation_numerics import OperationNumerics, argument_of, function_called

_NEGLIGIBLE = 1e-4  # magnitude of a gradient relative to the largest one
_CARRIED = ("add", "sub", "mul", "convert_element_type")  # through which a sum is carried on
_WORDS = {"convert_element_type": "cast to"}
WRONG = 0.1  # relative error of a result or gradient that infinities have gone into


@dataclasses.dataclass(frozen=True)
class StateLeaf:
    """A leaf in lower precision of the state that a step takes and returns.

    Attributes:
      path: path of the leaf.
      rows: the rows from which its new value comes.
      changing: number of its elements that change in the shadow.
      unchanged: number of these that stay the same in the actual state.
      dtype: name of the dtype.
    """

    path: str
    rows: frozenset[int]
    changing: int
    unchanged: int
    dtype: str


@dataclasses.dataclass(frozen=True)
class Evidence:
    """The input of the findings.

    Attributes:
      rows: the rows of the diagnosis.
      sites: sites of the rows.
      measures: [rows, columns].
      results: numbers of the rows from which the function's results come.
      state: leaves in lower precision that the function takes and returns.
      low_results: the rows from which these and other results in lower precision come.
      arguments: paths of the arguments by number.
      collapsed: paths of arguments whose values collapse when cast -> description of the collapse.
      nonfinite_arguments: numbers of arguments with NaN or infinities, with their paths.
      lost_state: paths of the state's leaves that were NaN before the first run.
      stuck_scale: a sentence about a loss scale that cannot decrease further; empty if it can.
      loss_scale: the largest one in the arguments; 1 without any.
      dynamic: True if it adapts.
    """

    rows: tuple[OperationNumerics, ...]
    sites: Sequence[Site]
    measures: np.ndarray
    results: frozenset[int]
    state: Sequence[StateLeaf]
    low_results: frozenset[int]
    arguments: Mapping[int, str]
    collapsed: dict[str, str]
    nonfinite_arguments: dict[int, str]
    lost_state: Sequence[str]
    stuck_scale: str
    loss_scale: float
    dynamic: bool

    def column(self, name: str) -> np.ndarray:
        """Returns a column of the measures, [rows]."""
        return self.measures[:, COLUMNS.index(name)]

    def argument(self, row: int) -> str:
        """Returns the path of the argument that a row casts; empty if it does not."""
        return argument_of(self.sites[row], self.arguments)

    def named(self, row: int) -> str:
        """Returns a row's operation as users write it, `x**2`, or its primitive, with the called function and type."""
        found, site = self.rows[row], self.sites[row]
        operation = _WORDS.get(found.primitive, found.primitive)
        if found.primitive == "integer_pow":
            operation = f"x**{site.equation.params['y']}"
        function = function_called(site)
        whose = f"{function}'s " if function else ""
        return f"{whose}{operation} {found.dtype}[{','.join(map(str, found.shape))}]"

    def sources(self, row: int) -> list[int]:
        """Returns the rows whose results a row reads."""
        return [i for i in self.sites[row].sources if i >= 0]

    def first_to_be(self, name: str) -> Iterator[int]:
        """Yields the rows whose results became `nan` or `infinite` before any of their operands."""
        for row, site in enumerate(self.sites):
            when = self._first(row, name)
            if when is None or any(-1 - source in self.nonfinite_arguments for source in site.sources):
                continue
            before = [self._first(i, name) for i in self.sources(row)]
            if all(other is None or other >= when for other in before):
                yield row

    def direction(self, row: int) -> Direction:
        """Returns the pass of a row; operations for the next state that do not belong to a gradient are updates."""
        direction = self.rows[row].direction
        if direction != "forward" or not any(site.direction == "backward" for site in self.sites):
            return direction
        after = {row, *self.after(row)}
        is_state = any(after & leaf.rows for leaf in self.state)
        return "update" if is_state and not any(self.rows[i].direction == "backward" for i in after) else direction

    def spreads(self, row: int) -> bool:
        """Returns whether infinities of a row reach results, produce NaN, or make results or gradients wrong."""
        return any(self.rows[i].nan for i in self.after(row)) or self.reaches(row, WRONG)

    def reaches(self, row: int, error: float) -> bool:
        """Returns whether a result or gradient depends on a row and has more than a given error."""
        after = {row, *self.after(row)}
        # An update makes much of gradients that are zero but for roundings.
        is_update = self.direction(row) == "update"
        ends = (i for i in self.ends if i in after and is_update == (self.sites[i].direction == "update"))
        return any(self._is_ruined(i) or self._error(i) > error for i in ends)

    @functools.cached_property
    def ends(self) -> list[int]:
        """The rows of results, and of the gradients that the backward pass gives to the update."""
        gradients = (i for i, site in enumerate(self.sites) if site.direction == "backward" and self._is_last(i))
        return sorted({*self.results, *gradients})

    def _is_last(self, row: int) -> bool:
        return any(self.sites[reader].direction == "update" for reader in self._readers[row])

    def _error(self, row: int) -> float:
        """Returns the error of a row; for a gradient, relative to its terms.

        Some gradients are zero except for rounding, such as those of values that do not affect a softmax or a norm.
        """
        if self.sites[row].direction != "backward":
            return self.rows[row].inherited_error
        elements = np.maximum(self.column("elements"), 1)
        error, magnitude = self.column("inherited_error") / elements, self.column("shadow_magnitude") / elements
        terms = self.column("shadow_terms") / elements
        ends = [i for i in self.ends if self.sites[i].direction == "backward"]
        whole = max(magnitude[row], terms[self._sum_of(row)], _NEGLIGIBLE * magnitude[ends].max())
        return float(error[row] / whole) if whole else 0.0

    def _sum_of(self, row: int) -> int:
        """Returns the row of the sum that a row casts, as a policy does that adds in float32; otherwise the row."""
        elements = self.column("elements")
        while self.rows[row].primitive in ("convert_element_type", "reduce_sum") and (sources := self.sources(row)):
            if elements[sources[0]] != elements[row]:  # also a sum over an axis of one element is no sum
                break
            row = sources[0]
        return row

    def _is_ruined(self, row: int) -> bool:
        """Returns whether a row is not finite, except for infinities due to a dynamic loss scale."""
        found = self.rows[row]
        is_infinite = found.infinite > 0 and not self.column("shadow_infinite")[row]
        return found.nan > 0 or (is_infinite and not (self.dynamic and found.direction != "forward"))

    def feeds_itself(self, row: int) -> bool:
        """Returns whether a row adds to its own result from the previous iteration of a loop, perhaps times a decay."""
        return row in reached(
            self.sources(row), lambda i: self.sources(i) if self.rows[i].primitive in _CARRIED else []
        )

    def after(self, row: int) -> list[int]:
        """Returns the rows that depend on a row's result, without the row itself."""
        return sorted(reached([row], self.readers) - {row})

    def before(self, row: int) -> set[int]:
        """Returns the rows on which a row depends, and the row itself."""
        return reached([row], self.sources)

    def readers(self, row: int) -> list[int]:
        """Returns the rows that read a row's result."""
        return self._readers[row]

    @functools.cached_property
    def _readers(self) -> list[list[int]]:
        readers: list[list[int]] = [[] for _ in self.sites]
        for row, site in enumerate(self.sites):
            for source in () if picks(site.equation) else self.sources(row):
                readers[source].append(row)
        return readers

    def first_nonfinite(self, row: int) -> tuple[int, float, int]:
        """Returns the time at which a row's result first became NaN or infinite, as comparable numbers."""
        found = (self._first(row, name) for name in ("nan", "infinite"))
        return min((when for when in found if when is not None), default=(len(self.sites), 0.0, row))

    def _first(self, row: int, name: str) -> tuple[int, float, int] | None:
        """Returns the time of a row's first `nan` or `infinite` result, as comparable numbers; None if never."""
        iteration = -self.column(f"first_{name}")[row]
        return None if math.isinf(iteration) else (self.sites[row].turn, iteration, row)


def reached(rows: Iterable[int], following: Callable[[int], Iterable[int]]) -> set[int]:
    """Returns rows, their followers, and the followers of these.

    Args:
      rows: the first rows.
      following: returns the followers of a row.
    """
    new = list(rows)
    found = set(new)
    while new:
        new = [i for last in new for i in following(last) if i not in found]
        found.update(new)
    return found
