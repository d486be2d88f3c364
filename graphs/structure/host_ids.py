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


def counting_argsort(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns the places of ids in their order, as argsort; scipy counts, and so is faster."""
    from scipy.sparse import csc_array

    places, columns = np.arange(len(ids), dtype=np.int32), np.arange(len(ids) + 1, dtype=np.int32)
    return csc_array((places, ids, columns), shape=(count, len(ids))).tocsr().data
