"""Fingerprints of arrays: four numbers for each row, by which rows are found again however an array is laid out.

A row is what lies along the last axis; its fingerprint is its products with four fixed random vectors, and its norm.
Numbers that stand for "not seen" (infinities, and what is beyond `_FILL`) count as zero, so that a row that is masked
or padded at its end has the fingerprint of the row without that.

Source: random projections keep distances (Johnson and Lindenstrauss, 1984).
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jmp_train.policies.diagnosing import Pair
from jmp_train.policies.pytrees import is_key

_COUNT = 4
COLUMNS = 2 * _COUNT + 1
_FILL = 9e3  # fills in use are -1e4, float16's -65504, seven tenths of it, and larger ones


def fingerprint(pair: Pair) -> list[np.ndarray]:
    """Returns of each row the fingerprints of its shadow and of itself, and the shadow's norm, float32 [rows, 9].

    Args:
      pair: an array and its shadow.

    Returns:
      One such table; of a vector a second one, in which each element is a row, since it may be that of a column. None
      of what cannot be compared, as random keys.
    """
    if is_key(pair.actual) or jnp.iscomplexobj(pair.actual) or not np.size(pair.actual):
        return []
    actual = _rows(pair.actual)
    shadow = actual if pair.shadow is None else _rows(pair.shadow)
    tables = [_table(shadow, actual)]
    if pair.actual.ndim == 1 and pair.actual.dtype != jnp.bool_:  # of which all elements are known
        tables.append(_table(shadow.reshape(-1, 1), actual.reshape(-1, 1)))
    return tables


def _table(shadow: np.ndarray, actual: np.ndarray) -> np.ndarray:
    weights, norm = _weights(actual.shape[1]), np.linalg.norm(shadow, axis=1, keepdims=True)
    return np.concatenate([shadow @ weights, actual @ weights, norm], axis=1)


def _rows(x: Any) -> np.ndarray:
    rows = np.asarray(x).astype(np.float32).reshape(-1, x.shape[-1] if x.ndim else 1)
    return np.where(np.abs(rows) < _FILL, rows, np.float32(0)) if jnp.issubdtype(x.dtype, jnp.floating) else rows


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
