"""Ids of nodes and edges on the host: padding, tests for order, counting sort."""

import numpy as np


def filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """Returns int32 [length]: an array padded with a value."""
    result = np.full(length, value, np.int32)
    result[: len(array)] = array
    return result


def ascends(ids: np.ndarray) -> bool:
    """Returns whether no number is less than the one before it."""
    return bool((ids[1:] >= ids[:-1]).all())


def counting_sort(ids: np.ndarray, count: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the stable argsort of ids, the values in that order, and the count of each id.

    scipy counts in linear time: it converts a sparse matrix with one entry per column from columns to rows.

    Args:
      ids: int32, from 0 to below `count`.
      count: number of possible ids.
      values: an array of the same length.

    Returns:
      The places, int32; the values; and the counts, int64 [count].
    """
    from scipy.sparse import csc_array

    columns = np.arange(len(ids) + 1, dtype=np.int32)
    rows = csc_array((values, ids, columns), shape=(count, len(ids))).tocsr()
    return rows.indices.astype(np.int32, copy=False), rows.data, np.diff(rows.indptr).astype(np.int64)
