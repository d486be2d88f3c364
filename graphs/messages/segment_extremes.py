"""The largest and the least rows of segments, exact in half precision."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp_train.graphs.messages.segment import checked_rows
from jmp_train.graphs.structure import Incidence, computed_once, rows_like, upcast


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the largest row of each segment, elementwise; -inf, or the least integer, without rows.

    Args:
      data: [rows, ...] of any real type.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's dtype. Ties share the gradient equally.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_max(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 0, 1]), 3).tolist()
      [3.0, 2.0, -inf]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    return segments.max(computed_once(upcast(data))).astype(data.dtype)


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the least row of each segment, elementwise; inf, or the largest integer, without rows.

    Args:
      data: [rows, ...] of any real type.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's dtype. Ties share the gradient equally.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_min(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 0, 1]), 3).tolist()
      [1.0, 2.0, inf]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    return segments.min(computed_once(upcast(data))).astype(data.dtype)


def segment_max_or_constant(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    constant: float = 0.0,
) -> jax.Array:
    """Returns the largest row of each segment, elementwise; a constant without rows.

    Args:
      data: [rows, ...] of any real type.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.
      constant: the result of segments without rows.

    Returns:
      [num_segments, ...] in the data's dtype. Ties share the gradient equally.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_max_or_constant(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 0, 1]), 3).tolist()
      [3.0, 2.0, 0.0]
    """
    rows, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    return _or_constant(segments.max(computed_once(upcast(rows))).astype(rows.dtype), segments, constant)


def segment_min_or_constant(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    constant: float = 0.0,
) -> jax.Array:
    """Returns the least row of each segment, elementwise; a constant without rows.

    Args:
      data: [rows, ...] of any real type.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.
      constant: the result of segments without rows.

    Returns:
      [num_segments, ...] in the data's dtype. Ties share the gradient equally.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_min_or_constant(jnp.array([1.0, 3.0, 2.0]), jnp.array([0, 0, 1]), 3, constant=9.0).tolist()
      [1.0, 2.0, 9.0]
    """
    rows, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    return _or_constant(segments.min(computed_once(upcast(rows))).astype(rows.dtype), segments, constant)


def _or_constant(extreme: jax.Array, segments: Incidence, constant: float) -> jax.Array:
    return jnp.where(rows_like(segments.degrees > 0, extreme), extreme, jnp.asarray(constant, extreme.dtype))
