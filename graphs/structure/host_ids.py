"""Ids of nodes and edges on the host: padding, tests for order, counting sort."""

import numpy as np


def filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """Returns int32 [length]: an array, followed by a value."""
    result = np.full(length, value, np.int32)
    result[: len(array)] = array
    return result


def ascends(ids: np.ndarray) -> bool:
    """Whether no number is less than the one before it."""
    return bool((ids[1:] >= ids[:-1]).all())


def counting_sort(ids: np.ndarray, count: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the places of ids in their order, as a stable argsort, the values there, and how often each id comes.

    scipy counts, which takes linear time: a matrix with an entry a column is turned from columns to rows.

    Args:
      ids: int32, from 0 to below `count`.
      count: how many different ids there may be.
      values: an array as long.

    Returns:
      The places, int32; the values; and the numbers, int64 [count].
    """
    from scipy.sparse import csc_array

    columns = np.arange(len(ids) + 1, dtype=np.int32)
    rows = csc_array((values, ids, columns), shape=(count, len(ids))).tocsr()
    return rows.indices.astype(np.int32, copy=False), rows.data, np.diff(rows.indptr).astype(np.int64)
