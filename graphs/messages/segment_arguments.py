"""Checks of what segment operations take."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp_train.graphs.structure import Incidence, as_count, incidence_of


def checked_rows(
    data: ArrayLike, segment_ids: ArrayLike, num_segments: int, is_sorted: bool
) -> tuple[jax.Array, Incidence]:
    """Returns the rows and the segments of a segment operation, checked; see `segment_sum`."""
    if data is None:
        raise TypeError("data must be an array, got None")
    data, ids = jnp.asarray(data), checked_ids_of_rows("segment_ids", segment_ids)
    count = as_count("num_segments", num_segments)
    if data.ndim == 0 or data.shape[0] != ids.shape[0]:
        raise ValueError(
            f"data and segment_ids must have the same number of rows, got shapes {data.shape} and {ids.shape}"
        )
    return data, incidence_of(ids, count, is_sorted=is_sorted)


def checked_ids_of_rows(name: str, ids: ArrayLike) -> jax.Array:
    """Returns ids as int32 or int64 [rows], checked; see `checked_ids`."""
    ids = checked_ids(name, ids)
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {ids.shape}")
    return ids


def checked_ids(name: str, ids: ArrayLike) -> jax.Array:
    """Returns ids as int32 or int64, checked.

    Args:
      name: of the argument, for messages.
      ids: what should be integers.
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    return ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
