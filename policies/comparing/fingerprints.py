"""Fingerprints of arrays: four numbers for each row, by which rows are found again however an array is laid out.

A row is what lies along the last axis; its fingerprint is its products with four fixed random vectors, and its norm.
Numbers that stand for "not seen" (infinities, and what is beyond `_FILL`) count as zero, so that a row that is masked
or padded at its end has the fingerprint of the row without that.

Source: random projections keep distances (Johnson and Lindenstrauss, 1984).
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
_FILL = 9e3  # fills in use are -1e4, float16's -65504, seven tenths of it, and larger ones


@dataclasses.dataclass(frozen=True)
class Prints:
    """Fingerprints of the rows of an array, float32 [rows, 9]: of each row those of its shadow and of itself, its norm.

    Attributes:
      rows: of the rows.
      elements: of a vector each element as a row, since it may be that of a column; else None.
      columns: of what lies along the last axis but one, where that is long; None for other arrays.
      seen: of the rows with one added to what is seen, so that a zero that is seen is another one than a fill; None for
        arrays without a second axis.
      has_fill: whether there is something that stands for "not seen".
    """

    rows: np.ndarray
    elements: np.ndarray | None
    columns: np.ndarray | None
    seen: np.ndarray | None
    has_fill: bool

    @property
    def tables(self) -> list[np.ndarray]:
        """All in which rows of another function are looked for."""
        return [table for table in (self.rows, self.elements, self.seen) if table is not None]


def fingerprint(pair: Pair) -> Prints | None:
    """Returns the fingerprints of an array's rows; None of what cannot be compared, as random keys.

    Args:
      pair: an array and its shadow.
    """
    if is_key(pair.actual) or jnp.iscomplexobj(pair.actual) or not np.size(pair.actual):
        return None
    actual, is_seen = _rows(pair.actual)
    shadow = actual if pair.shadow is None else _rows(pair.shadow)[0]
    has_columns = pair.actual.ndim > 1 and pair.actual.shape[-2] >= LEAST_NUMBERS
    is_vector = pair.actual.ndim == 1 and pair.actual.dtype != jnp.bool_  # of which all elements are known
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
    """Returns the rows of an array, with zeros for what is not seen, and what is."""
    rows = np.asarray(x).astype(np.float32).reshape(-1, x.shape[-1] if x.ndim else 1)
    is_seen = np.abs(rows) < _FILL if jnp.issubdtype(x.dtype, jnp.floating) else np.ones(rows.shape, bool)
    return np.where(is_seen, rows, np.float32(0)), is_seen


def _columns(rows: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    return rows.reshape(-1, *shape[-2:]).swapaxes(1, 2).reshape(-1, shape[-2])


@functools.lru_cache
def _weights(length: int) -> np.ndarray:
    """Returns four random vectors [length, 4], whose beginnings are those of all lengths."""
    return np.random.default_rng(0).normal(size=(length, _COUNT)).astype(np.float32)


class Rows:
    """Fingerprints of rows.

    Args:
      table: [rows, 9], as `fingerprint` makes them, of arrays that may be many.

    Attributes:
      shadow: of the shadows, [rows, 4].
      actual: of the rows themselves, [rows, 4].
      norm: of the shadows, [rows].
    """

    def __init__(self, table: np.ndarray) -> None:
        self.shadow, self.actual, self.norm = table[:, :_COUNT], table[:, _COUNT:-1], table[:, -1]

    def __len__(self) -> int:
        return len(self.norm)
