"""Finds rows of one program again among all rows of another, by their fingerprints."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jmp_train.policies.comparing.fingerprints import COLUMNS, LEAST_NUMBERS, Rows

# Two orders of the same float32 sums differ by less, relative to a row's norm, and other mathematics by more.
SAME = 1e-4
_MOST_QUERIES = 256  # rows of an operation that are looked for
_MOST_NEIGHBORS = 1024  # rows of the other program that one row is compared with


@dataclasses.dataclass(frozen=True)
class Found:
    """How far an operation's rows are from those of another program.

    Attributes:
      unknown: share of rows whose shadow the other program does not have.
      apart: mean difference of the shadows from those of the same rows there, relative to a row's norm.
      difference: mean difference from the same row of the other program, likewise; NaN if none is known.
      error: mean difference from the own shadow, likewise.
      only_seen: whether the rows are known, and which of their numbers are seen is not.
      in_column: of rows of one number each, whether one operation there has all of them; None if that is not known.
    """

    unknown: float
    apart: float
    difference: float
    error: float
    only_seen: bool = False
    in_column: bool | None = None


def is_column_of(column: np.ndarray, others: Sequence[np.ndarray]) -> bool | None:
    """Returns whether all numbers of a column are in one other; None if they are so few that they may be by chance.

    Args:
      column: numbers.
      others: sorted numbers, each of one operation.
    """
    column = np.unique(column)
    if len(column) < LEAST_NUMBERS:
        return None
    column = column[:: -(-len(column) // _MOST_QUERIES)]
    return any(_has_all(other, column) for other in others if len(other) >= LEAST_NUMBERS)


def _has_all(other: np.ndarray, column: np.ndarray) -> bool:
    places = np.searchsorted(other, column)
    below, above = other[np.maximum(places - 1, 0)], other[np.minimum(places, len(other) - 1)]
    return bool((np.minimum(np.abs(below - column), np.abs(above - column)) <= SAME * np.abs(column)).all())


class KnownRows:
    """The rows of all operations of a program.

    Args:
      tables: of the operations, as `fingerprint` makes them.
    """

    def __init__(self, tables: Sequence[np.ndarray]) -> None:
        together = np.unique(np.concatenate([np.zeros((0, COLUMNS), np.float32), *tables]), axis=0)
        self._rows = Rows(together[np.argsort(together[:, 0], kind="stable")])

    def found(self, table: np.ndarray) -> Found:
        """Returns how far rows of the other program are from these.

        Args:
          table: as `fingerprint` makes it; of more than 256 rows some are taken.
        """
        rows = Rows(table[:: -(-len(table) // _MOST_QUERIES)])
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            apart, difference = self._differences(rows)
            known = np.isfinite(difference)
            error = _distance(rows.shadow, rows.actual) / rows.norm
        error = np.where(rows.norm > 0, error, 0)
        return Found(
            unknown=float(1 - known.mean()),
            apart=float(apart[known].mean()) if known.any() else 0.0,
            difference=float(difference[known].mean()) if known.any() else float("nan"),
            error=float(error.mean()),
        )

    def _differences(self, rows: Rows) -> tuple[np.ndarray, np.ndarray]:
        """Returns of each row how far its shadow and itself are from those of the nearest rows with the same shadow.

        They are infinite where there is none. A row of zeros says nothing, and is known.
        """
        reach = SAME * rows.norm
        keys = self._rows.shadow[:, 0]
        first = np.searchsorted(keys, rows.shadow[:, 0] - reach)
        last = np.minimum(np.searchsorted(keys, rows.shadow[:, 0] + reach, side="right"), first + _MOST_NEIGHBORS)
        apart, difference = (np.where(rows.norm > 0, np.inf, 0.0) for _ in range(2))
        active = np.flatnonzero((first < last) & (rows.norm > 0))
        while active.size:
            near, norm = first[active], rows.norm[active]
            shadows = _distance(self._rows.shadow[near], rows.shadow[active]) / norm
            own = _distance(self._rows.actual[near], rows.actual[active]) / norm
            apart[active] = np.minimum(apart[active], np.where(shadows <= SAME, shadows, np.inf))
            difference[active] = np.minimum(difference[active], np.where(shadows <= SAME, own, np.inf))
            first[active] += 1
            active = active[(first[active] < last[active]) & (difference[active] + apart[active] > 0)]
        return apart, difference


def _distance(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns of each row the root mean square of the differences, which is about the norm of the rows' difference."""
    return np.sqrt(np.square(first.astype(np.float64) - second).mean(axis=1))
