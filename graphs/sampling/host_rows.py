"""Rows of arrays that stay in the host's memory, or on disk."""

import numpy as np
from jax.typing import DTypeLike


def take_rows(array: np.ndarray, ids: np.ndarray, dtype: DTypeLike | None = None) -> np.ndarray:
    """Returns some rows of an array of the host, such as those of a mini-batch's `inputs`.

    Args:
      array: [nodes, ...], an array of numpy's; a `numpy.memmap` is read where it is needed only.
      ids: int [rows]; -1 for padding, which gets 0.
      dtype: of the result; None for the array's own. A half type halves what goes to the device.

    Returns:
      [rows, ...].

    Raises:
      ValueError: an id is out of range.

    Example:
      >>> take_rows(np.array([[1.0], [2.0]]), np.array([1, -1, 0])).tolist()
      [[2.0], [0.0], [1.0]]
    """
    if ids.size and not -1 <= ids.min() <= ids.max() < len(array):
        raise ValueError(f"ids must be between -1 and {len(array) - 1}, got {ids.min()} to {ids.max()}")
    is_padding = ids < 0
    if len(array) == 0:
        return np.zeros((len(ids), *array.shape[1:]), dtype or array.dtype)
    rows = array[np.where(is_padding, 0, ids)]
    rows = rows if dtype is None else rows.astype(dtype, copy=False)
    rows[is_padding] = 0
    return rows
