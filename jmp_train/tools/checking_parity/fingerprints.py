"""Computes fingerprints of arrays, a few numbers per row, and finds rows of one program among those of another.

A row lies along the last axis. Its fingerprint consists of its products with four fixed random vectors and its norm.
Numbers that stand for "not seen" (infinities, and numbers beyond `FILL`) count as zero, so masking or padding a row at
its end does not change its fingerprint.

Reference: random projections preserve distances (Johnson and Lindenstrauss, 1984).
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.pytrees import is_key
from jmp_train.tools.checking_parity.counterparts import FILL
from jmp_train.tools.diagnosing import Pair

_COUNT = 4
COLUMNS = 2 * _COUNT + 1
# Relative to a row's norm, the same float32 sums in another order differ by less, and different mathematics by more.
SAME = 1e-4
_MOST_QUERIES = 256  # rows to search for, per operation
_MOST_NEIGHBORS = 1024  # rows of the other program to compare one row with


@dataclasses.dataclass(frozen=True)
class Prints:
    """Fingerprints of the rows of an array, float32 [rows, 9]: per row, those of its shadow and itself, and the norm.

    Attributes:
      rows: the fingerprints of the rows.
      elements: for a vector, the fingerprints of each element as a row, because it may belong to a column; otherwise
        None.
    """

    rows: np.ndarray
    elements: np.ndarray | None

    @property
    def tables(self) -> list[np.ndarray]:
        """All tables in which to search for rows of another function."""
        return [table for table in (self.rows, self.elements) if table is not None]


def fingerprint(pair: Pair) -> Prints | None:
    """Returns the fingerprints of an array's rows; None for arrays that cannot be compared, such as random keys.

    Args:
      pair: an array and its shadow.
    """
    if is_key(pair.actual) or jnp.iscomplexobj(pair.actual) or not np.size(pair.actual):
        return None
    actual = _rows(pair.actual)
    shadow = actual if pair.shadow is None else _rows(pair.shadow)
    is_vector = pair.actual.ndim == 1 and pair.actual.dtype != jnp.bool_  # all elements of booleans are known
    return Prints(
        rows=_table(shadow, actual),
        elements=_table(shadow.reshape(-1, 1), actual.reshape(-1, 1)) if is_vector else None,
    )


def _table(shadow: np.ndarray, actual: np.ndarray) -> np.ndarray:
    weights, norm = _weights(actual.shape[1]), np.linalg.norm(shadow, axis=1, keepdims=True)
    return np.concatenate([shadow @ weights, actual @ weights, norm], axis=1)


def _rows(x: Any) -> np.ndarray:
    """Returns the rows of an array with zeros for numbers that are not seen."""
    rows = np.asarray(x).astype(np.float32).reshape(-1, x.shape[-1] if x.ndim else 1)
    return np.where(np.abs(rows) < FILL, rows, np.float32(0)) if jnp.issubdtype(x.dtype, jnp.floating) else rows


@functools.lru_cache
def _weights(length: int) -> np.ndarray:
    """Returns four random vectors, [length, 4]; shorter ones are the beginnings of longer ones."""
    return np.random.default_rng(0).normal(size=(length, _COUNT)).astype(np.float32)


class Rows:
    """Fingerprints of rows.

    Args:
      table: [rows, 9], from `fingerprint`, of one or more arrays.

    Attributes:
      shadow: the fingerprints of the shadows, [rows, 4].
      actual: the fingerprints of the rows themselves, [rows, 4].
      norm: the norms of the shadows, [rows].
    """

    def __init__(self, table: np.ndarray) -> None:
        self.shadow, self.actual, self.norm = table[:, :_COUNT], table[:, _COUNT:-1], table[:, -1]


@dataclasses.dataclass(frozen=True)
class MatchedRows:
    """The differences of an operation's rows from those of another program.

    Attributes:
      unknown: the fraction of rows whose shadow the other program does not have.
      apart: the mean difference of the shadows from those of the same rows in the other program, relative to the norm.
      difference: the mean difference from the same row of the other program, likewise; NaN if no row is known.
      error: the mean difference from the own shadow, likewise.
    """

    unknown: float
    apart: float
    difference: float
    error: float


class KnownRows:
    """The rows of all operations of a program.

    Args:
      tables: the fingerprints of the operations, from `fingerprint`.
    """

    def __init__(self, tables: Sequence[np.ndarray]) -> None:
        together = np.unique(np.concatenate([np.zeros((0, COLUMNS), np.float32), *tables]), axis=0)
        self._rows = Rows(together[np.argsort(together[:, 0], kind="stable")])

    def found(self, table: np.ndarray) -> MatchedRows:
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
        return MatchedRows(
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
