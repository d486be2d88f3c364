"""Which nodes or edges a caller means: ids, or a mask; on the host."""

import jax
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.policies.pytrees import has_tracers

ID = "_ID"  # the feature that keeps original ids, as DGL's NID and EID


def chosen_ids(name: str, ids: Ids, count: int, *, distinct: bool = True) -> np.ndarray:
    """Returns ids of nodes or edges, int64 [chosen], checked.

    Args:
      name: of the argument, for messages.
      ids: int [chosen], or bool [count]; one integer stands for a list of it.
      count: how many there are.
      distinct: whether none may be there twice.

    Raises:
      TypeError: they are neither integers nor booleans, or traced.
      ValueError: they have the wrong shape, are out of range, or are there twice; the message says which.

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
            raise ValueError(f"{name}[{place}] = {array[place]} is there twice")
    return array


def mask_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns bool [count], which of so many are among some ids.

    Args:
      ids: int [some], in range.
      count: how many there are.

    Example:
      >>> mask_of(np.array([2, 0]), 3).tolist()
      [True, False, True]
    """
    mask = np.full(count, False)
    mask[ids] = True
    return mask


def as_they_come(ids: np.ndarray) -> np.ndarray:
    """Returns each id once, where it is first."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]
