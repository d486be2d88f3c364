"""Segment operations that compute in float32, forward and backward.

They take the same arguments as jraph's. In float16 a running sum of ones ends at 2,048, in bfloat16 at 256, without any
NaN; here arrays may be stored in half precision, and sums are computed in float32.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_train.graphs.structure import (
    Incidence,
    as_count,
    as_inexact,
    check_known,
    incidence_of,
    upcast,
    upcast_integers,
)


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the sum of each segment.

    Args:
      data: [rows, ...] of any number type.
      segment_ids: int [rows], the segment of each row; rows of ids out of range count nowhere.
      num_segments: number of segments; None for one more than the largest id, outside of jit.
      indices_are_sorted: whether the ids ascend.

    Returns:
      [num_segments, ...] in the data's dtype: added in at least float32, in blocks, and rounded once.
      Booleans and integers of less than 32 bits are added in 32 bits, and stay so, as with `jnp.sum`.

    Raises:
      ValueError: `data` and `segment_ids` differ in length, or `num_segments` is negative.
      TypeError: the ids, or `num_segments`, are not integers; or ids are traced and `num_segments` is None.

    Example:
      >>> import jax.numpy as jnp
      >>> ones, zeros = jnp.ones(13_161, jnp.float16), jnp.zeros(13_161, jnp.int32)
      >>> segment_sum(ones, zeros, 1).tolist()  # the nearest float16
      [13160.0]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = upcast_integers(data)
    return segments.sum(upcast(data)).astype(data.dtype)


def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the mean of each segment, 0 of those without rows.

    Args:
      data: [rows, ...]; the means of integers are floats.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's floating dtype. The sum is divided before it is rounded, so that a mean
      never overflows.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_mean(jnp.full(10, 1e4, jnp.float16), jnp.zeros(10, jnp.int32), 2).tolist()
      [10000.0, 0.0]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = as_inexact(data)
    return segments.mean(upcast(data)).astype(data.dtype)


def segment_softmax(
    logits: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the softmax of the rows of each segment, elementwise.

    Args:
      logits: [rows, ...], integers as floats; -inf masks a row, and a segment that is masked altogether is 0.
      segment_ids: see `segment_sum`; rows of ids out of range are 0.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [rows, ...] in the logits' floating dtype.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> weights = segment_softmax(jnp.zeros(4096, jnp.bfloat16), jnp.zeros(4096, jnp.int32), 1)
      >>> float(weights.sum(dtype=jnp.float32))
      1.0
    """
    shape = jnp.shape(logits)
    logits, segments = checked_rows(logits, segment_ids, num_segments, indices_are_sorted)
    logits = as_inexact(logits)
    return segments.softmax(upcast(logits)).astype(logits.dtype).reshape(shape)


def segment_normalize(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
    eps: float = 1e-8,
) -> jax.Array:
    """Returns the rows with mean 0 and variance 1 in each segment, elementwise.

    Args:
      data: [rows, ...], integers as floats.
      segment_ids: see `segment_sum`; rows of ids out of range are 0.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.
      eps: the least variance, in float32.

    Returns:
      [rows, ...] in the data's floating dtype.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_normalize(jnp.array([300, -300, 5], jnp.float16), jnp.array([0, 0, 1]), 2).tolist()
      [1.0, -1.0, 0.0]
    """
    shape = jnp.shape(data)
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = as_inexact(data)
    rows = segments.counted(upcast(data))
    centered = rows - segments.read(segments.mean(rows))
    variance = segments.mean(centered * centered)
    scale = lax.rsqrt(jnp.maximum(variance, jnp.asarray(eps, variance.dtype)))
    return (centered * segments.read(scale)).astype(data.dtype).reshape(shape)


def gather(data: ArrayLike, indices: ArrayLike, *, indices_are_sorted: bool = False) -> jax.Array:
    """Returns `data[indices]`, whose gradient is added in float32.

    Args:
      data: [rows, ...].
      indices: int [reads], or of any shape, as one row or [edges, negatives]; indices out of range read zeros.
      indices_are_sorted: whether the indices ascend, row after row.

    Returns:
      The indices' shape, then that of a row, in the data's dtype.

    Raises:
      ValueError: `data` is a scalar.
      TypeError: the indices are not integers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> reads = jnp.zeros(13_161, jnp.int32)
      >>> jax.grad(lambda x: gather(x, reads).sum().astype("float32"))(jnp.ones(1, "float16")).tolist()
      [13160.0]
    """
    data, indices = jnp.asarray(data), checked_ids("indices", indices)
    if data.ndim == 0:
        raise ValueError("data must have rows, got a scalar")
    rows = incidence_of(indices.ravel(), data.shape[0], is_sorted=indices_are_sorted)
    return rows.read(upcast(data)).astype(data.dtype).reshape(*indices.shape, *data.shape[1:])


def checked_rows(
    data: ArrayLike, segment_ids: ArrayLike, num_segments: int | None, is_sorted: bool
) -> tuple[jax.Array, Incidence]:
    """Returns the rows and the segments of a segment operation, checked; see `segment_sum`. A scalar is one row."""
    if data is None:
        raise TypeError("data must be an array, got None")
    if np.ndim(data) == np.ndim(segment_ids) == 0:
        data, segment_ids = jnp.asarray(data)[None], jnp.asarray(segment_ids)[None]
    data, ids = jnp.asarray(data), checked_ids_of_rows("segment_ids", segment_ids)
    if num_segments is None:
        check_known("segment_ids", ids, "num_segments=None is for code outside of jit")
        num_segments = 1 + int(np.max(ids, initial=-1))
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
      name: name of the argument, for messages.
      ids: the value to check.
    """
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    return ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
