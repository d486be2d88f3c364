"""Computes fingerprints of arrays: a few numbers per row, to find equal rows in arrays of any layout.

A row lies along the last axis. Its fingerprint consists of its products with four fixed random vectors and its norm.
Numbers that stand for "not seen" (infinities, and numbers beyond `_FILL`) count as zero, so masking or padding a row at
its end does not change its fingerprint.

Reference: random projections preserve distances (Johnson and Lindenstrauss, 1984).
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.diagnosing import Pair
from jmp_train.policies.pytrees import is_key

LEAST_NUMBERS = 8
"""How many there have to be to be told from others, which may be alike by chance."""
_COUNT = 4
COLUMNS = 2 * _COUNT + 1
_FILL = 9e3  # common fills are -1e4, float16's -65504, 0.7 times that, and larger ones


@dataclasses.dataclass(frozen=True)
class Prints:
    """Fingerprints of the rows of an array, float32 [rows, 9]: per row, those of its shadow and itself, and the norm.

    Attributes:
      rows: the fingerprints of the rows.
      elements: for a vector, the fingerprints of each element as a row, because it may belong to a column; otherwise
        None.
      columns: the fingerprints along the second-to-last axis, if that is long; None for other arrays.
      seen: the fingerprints of the rows with 1 added to seen numbers, so that a seen zero differs from a fill; None for
        arrays without a second axis.
      has_fill: True if a number stands for "not seen".
    """

    rows: np.ndarray
    elements: np.ndarray | None
    columns: np.ndarray | None
    seen: np.ndarray | None
    has_fill: bool

    @property
    def tables(self) -> list[np.ndarray]:
        """Returns all tables in which to search for rows of another function."""
        return [table for table in (self.rows, self.elements, self.seen) if table is not None]


def fingerprint(pair: Pair) -> Prints | None:
    """Returns the fingerprints of an array's rows; None for arrays that cannot be compared, such as random keys.

    Args:
      pair: an array and its shadow.
    """
    if is_key(pair.actual) or jnp.iscomplexobj(pair.actual) or not np.size(pair.actual):
        return None
    actual, is_seen = _rows(pair.actual)
    shadow = actual if pair.shadow is None else _rows(pair.shadow)[0]
    has_columns = pair.actual.ndim > 1 and pair.actual.shape[-2] >= LEAST_NUMBERS
    is_vector = pair.actual.ndim == 1 and pair.actual.dtype != jnp.bool_  # all elements of booleans are known
    return Prints(
        rows=_table(shadow, actual),
        elements=_table(shadow.reshape(-1, 1), actual.reshape(-1, 1)) if is_vector else None,
        columns=_table(*(_columns(rows, pair.actual.shape) for rows in (shadow, actual))) if has_columns else None,
        seen=_table(shadow + is_seen, actual + is_seen) if pair.actual.ndim > 1 else None,
        has_fill=not is_seen.all(),
    )


def _table(shadow: np.ndarray, actual: np.ndarray) -> np.ndarray:
    weights, norm = _weights(actual.shape[1]), np.linalg.norm(shadow, axis=1, keepdims=True)
    return np.concatenate([shadow @ weights, actual @ weights, norm], axis=1)


def _rows(x: Any) -> tuple[np.ndarray, np.ndarray]:
    """Returns the rows of an array with zeros for numbers that are not seen, and the mask of seen numbers."""
    rows = np.asarray(x).astype(np.float32).reshape(-1, x.shape[-1] if x.ndim else 1)
    is_seen = np.abs(rows) < _FILL if jnp.issubdtype(x.dtype, jnp.floating) else np.ones(rows.shape, bool)
    return np.where(is_seen, rows, np.float32(0)), is_seen


def _columns(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return rows.reshape(-1, *shape[-2:]).swapaxes(1, 2).reshape(-1, shape[-2])


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

    def __len__(self) -> int:
        return len(self.norm)
