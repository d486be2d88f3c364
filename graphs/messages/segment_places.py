"""Places and running sums within segments: which row is the largest, and what comes before each row."""

import jax
from jax.typing import ArrayLike

from jmp_train.graphs.messages.segment_arguments import checked_rows
from jmp_train.graphs.structure import upcast, upcast_integers


def segment_argmax(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the row with the largest data of each segment, elementwise; -1 of segments without rows.

    Args:
      data: [rows, ...] of any real type.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      Int32 [num_segments, ...], the first such row; NaN counts as the largest, as for `jnp.argmax`.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_argmax(jnp.array([1.0, 3.0, 3.0, 2.0]), jnp.array([0, 0, 0, 1]), 3).tolist()
      [1, 3, -1]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    return segments.argmax(upcast(data))


def segment_argmin(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the row with the least data of each segment, elementwise; see `segment_argmax`.

    Args:
      data: see `segment_argmax`.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      Int32 [num_segments, ...].

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_argmin(jnp.array([1.0, 3.0, 3.0, 2.0]), jnp.array([0, 0, 0, 1]), 3).tolist()
      [0, 3, -1]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    return segments.argmin(upcast(data))


def segment_cumsum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    exclusive: bool = False,
    reverse: bool = False,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the sum of the rows of a segment up to each row, in the order of the rows.

    Args:
      data: [rows, ...] of any number type.
      segment_ids: see `segment_sum`; rows of ids out of range are 0.
      num_segments: see `segment_sum`.
      exclusive: whether a row itself is left out of its sum.
      reverse: whether sums go from the last row to the first.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [rows, ...] in the data's dtype, as of `segment_sum`: added in at least float32, in pairs and pairs of pairs, and
      rounded once.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> rows, ids = jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.array([0, 1, 0, 1])
      >>> segment_cumsum(rows, ids, 2).tolist(), segment_cumsum(rows, ids, 2, exclusive=True).tolist()
      ([1.0, 2.0, 4.0, 6.0], [0.0, 0.0, 1.0, 2.0])

    Reference: Blelloch, Prefix Sums and Their Applications, 1990.
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = upcast_integers(data)
    return segments.cumsum(upcast(data), exclusive=exclusive, reverse=reverse).astype(data.dtype)
