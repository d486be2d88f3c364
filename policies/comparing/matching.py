"""Finds rows of one program among all rows of another by their fingerprints."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jmp_train.policies.comparing.fingerprints import COLUMNS, LEAST_NUMBERS, Rows

# Relative to a row's norm, the same float32 sums in another order differ by less, and different mathematics by more.
SAME = 1e-4
_MOST_QUERIES = 256  # rows to search for, per operation
_MOST_NEIGHBORS = 1024  # rows of the other program to compare one row with


@dataclasses.dataclass(frozen=True)
class Found:
    """The differences of an operation's rows from those of another program.

    Attributes:
      unknown: the fraction of rows whose shadow the other program does not have.
      apart: the mean difference of the shadows from those of the same rows there, relative to a row's norm.
      difference: the mean difference from the same row of the other program, likewise; NaN if no row is known.
      error: the mean difference from the own shadow, likewise.
      only_seen: True if the rows are known and only the mask of their seen numbers is not.
      in_column: for rows of one number each, True if one operation there has all of them; None if unknown.
    """

    unknown: float
    apart: float
    difference: float
    error: float
    only_seen: bool = False
    in_column: bool | None = None


def is_column_of(column: np.ndarray, others: Sequence[np.ndarray]) -> bool | None:
    """Returns whether another column has all numbers of a column; None if too few to rule out chance.

    Args:
      column: numbers.
      others: columns of sorted numbers, one per operation.
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
      tables: the fingerprints of the operations, from `fingerprint`.
    """

    def __init__(self, tables: Sequence[np.ndarray]) -> None:
        together = np.unique(np.concatenate([np.zeros((0, COLUMNS), np.float32), *tables]), axis=0)
        self._rows = Rows(together[np.argsort(together[:, 0], kind="stable")])

    def found(self, table: np.ndarray) -> Found:
        """Returns the differences between rows of the other program and these.

        Args:
          table: fingerprints, from `fingerprint`; more than 256 rows are sampled.
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
        """Returns, per row, the differences of its shadow and itself from the nearest row with the same shadow.

        The differences are infinite if there is no such row. A row of zeros carries no information and counts as known.
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
    """Returns the root mean square of each row's differences, which approximates the norm of the difference."""
    return np.sqrt(np.square(first.astype(np.float64) - second).mean(axis=1))
