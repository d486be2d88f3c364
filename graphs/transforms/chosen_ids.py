"""Nodes or edges chosen by a caller: ids, or a mask; on the host."""

import jax
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.policies.pytrees import has_tracers

ID = "_ID"  # the feature with original ids, like DGL's NID and EID


def chosen_ids(name: str, ids: Ids, count: int, *, distinct: bool = True) -> np.ndarray:
    """Returns checked ids of nodes or edges, int64 [chosen].

    Args:
      name: the argument's name, for messages.
      ids: int [chosen], or bool [count]; one integer stands for a list of it.
      count: number of nodes or edges.
      distinct: True to refuse repeated ids.

    Raises:
      TypeError: they are neither integers nor booleans, or traced.
      ValueError: they have the wrong shape, are out of range, or are repeated; the message names the id.

    Example:
      >>> chosen_ids("nodes", [2, 0], 3), chosen_ids("nodes", np.array([True, False, True]), 3)
      (array([2, 0]), array([0, 2]))
    """
    if has_tracers(ids):
        raise TypeError(f"{name} is traced: transforms run outside of jit")
    array = np.atleast_1d(np.asarray(ids))
    if array.size == 0 and not isinstance(ids, np.ndarray | jax.Array):
        array = array.astype(np.int64)  # an empty list is float64
    if array.dtype == np.bool_:
        if array.shape != (count,):
            raise ValueError(f"{name} must be a mask of shape ({count},), got shape {array.shape}")
        return np.flatnonzero(array)
    if not np.issubdtype(array.dtype, np.integer):
        raise TypeError(f"{name} must be integers or booleans, got {array.dtype}")
    if array.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {array.shape}")
    wrong = (array < 0) | (array >= count)
    if wrong.any():
        place = int(wrong.argmax())
        raise ValueError(f"{name}[{place}] = {array[place]} is out of range for {count}")
    array = array.astype(np.int64)
    if distinct and len(array) > 1:
        order = np.argsort(array, kind="stable")
        again = np.flatnonzero(array[order[1:]] == array[order[:-1]])
        if len(again):
            place = int(order[again[0] + 1])
            raise ValueError(f"{name}[{place}] = {array[place]} occurs twice")
    return array


def mask_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns bool [count], True for the given ids.

    Args:
      ids: int [some], in range.
      count: number of possible ids.

    Example:
      >>> mask_of(np.array([2, 0]), 3).tolist()
      [True, False, True]
    """
    mask = np.full(count, False)
    mask[ids] = True
    return mask


def as_they_come(ids: np.ndarray) -> np.ndarray:
    """Returns each id once, in the order of first occurrence."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]
