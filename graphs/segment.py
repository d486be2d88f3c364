"""Operations on segments, right in half precision: float32 inside, forwards and backwards.

They take what jraph's take. In float16 a running sum of ones ends at 2,048, in bfloat16 at 256, with
no NaN to tell; here what is stored may be half, and what is added is float32.
"""

import operator
from typing import Any

import jax
import jax.numpy as jnp
import jraph
from jax import lax
from jax.typing import ArrayLike

from jmp_train.graphs.accumulation import read_rows, sum_rows


def segment_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the sum of each segment.

    Args:
      data: [rows, ...] of any number type.
      segment_ids: int [rows], the segment of each row; rows of ids out of range count nowhere.
      num_segments: how many segments there are.
      indices_are_sorted: whether the ids ascend.

    Returns:
      [num_segments, ...] in the data's dtype: added in float32 (or wider), in blocks, and rounded once.

    Raises:
      ValueError: `data` and `segment_ids` differ in length, or `num_segments` is negative.
      TypeError: the ids, or `num_segments`, are no integers.

    Example:
      >>> import jax.numpy as jnp
      >>> ones, zeros = jnp.ones(13_161, jnp.float16), jnp.zeros(13_161, jnp.int32)
      >>> segment_sum(ones, zeros, 1).tolist()  # the nearest float16
      [13160.0]
    """
    data, ids, count = _checked(data, segment_ids, num_segments)
    sums = sum_rows(_wide(data), ids, count, is_sorted=indices_are_sorted)
    return sums.astype(data.dtype)


def segment_mean(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the mean of each segment, 0 of those without rows.

    Args:
      data: floating [rows, ...].
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's dtype. The sum is divided before it is rounded, so that a mean
      never overflows.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_mean(jnp.full(10, 1e4, jnp.float16), jnp.zeros(10, jnp.int32), 2).tolist()
      [10000.0, 0.0]
    """
    data, ids, count = _checked(data, segment_ids, num_segments)
    mean = _mean(_wide(data), ids, count, indices_are_sorted)
    return mean.astype(data.dtype)


def segment_max(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
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
    data, ids, count = _checked(data, segment_ids, num_segments)
    wide = jraph.segment_max(_wide(data), _none_negative(ids, count), count, indices_are_sorted)
    return wide.astype(data.dtype)


def segment_min(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
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
    data, ids, count = _checked(data, segment_ids, num_segments)
    wide = jraph.segment_min(_wide(data), _none_negative(ids, count), count, indices_are_sorted)
    return wide.astype(data.dtype)


def segment_softmax(
    logits: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the softmax of the rows of each segment, elementwise.

    Args:
      logits: floating [rows, ...]; -inf masks a row, and a segment that is masked altogether is 0.
      segment_ids: see `segment_sum`; rows of ids out of range are 0.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [rows, ...] in the logits' dtype.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> weights = segment_softmax(jnp.zeros(4096, jnp.bfloat16), jnp.zeros(4096, jnp.int32), 1)
      >>> float(weights.sum(dtype=jnp.float32))
      1.0
    """
    logits, ids, count = _checked(logits, segment_ids, num_segments)
    wide = _wide(logits)
    largest = jraph.segment_max(
        lax.stop_gradient(wide), _none_negative(ids, count), count, indices_are_sorted
    )
    largest = jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))
    weights = jnp.exp(wide - read_rows(largest, ids, is_sorted=indices_are_sorted))
    total = sum_rows(weights, ids, count, is_sorted=indices_are_sorted)
    inverse = 1 / jnp.where(total == 0, jnp.ones_like(total), total)
    weights = weights * read_rows(inverse, ids, is_sorted=indices_are_sorted)
    return weights.astype(logits.dtype)


def segment_normalize(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int,
    *,
    indices_are_sorted: bool = False,
    eps: float = 1e-8,
) -> jax.Array:
    """Returns the rows with mean 0 and variance 1 in each segment, elementwise.

    Args:
      data: floating [rows, ...].
      segment_ids: see `segment_sum`; rows of ids out of range have no meaning.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.
      eps: the least variance, in float32.

    Returns:
      [rows, ...] in the data's dtype.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_normalize(jnp.array([300, -300, 5], jnp.float16), jnp.array([0, 0, 1]), 2).tolist()
      [1.0, -1.0, 0.0]
    """
    data, ids, count = _checked(data, segment_ids, num_segments)
    wide, is_sorted = _wide(data), indices_are_sorted
    centred = wide - read_rows(_mean(wide, ids, count, is_sorted), ids, is_sorted=is_sorted)
    variance = _mean(centred * centred, ids, count, is_sorted)
    scale = lax.rsqrt(jnp.maximum(variance, jnp.asarray(eps, variance.dtype)))
    return (centred * read_rows(scale, ids, is_sorted=is_sorted)).astype(data.dtype)


def gather(data: ArrayLike, indices: ArrayLike, *, indices_are_sorted: bool = False) -> jax.Array:
    """Returns `data[indices]`, whose gradient is added in float32.

    Args:
      data: [rows, ...].
      indices: int [reads]; where they are out of range, zeros are read.
      indices_are_sorted: whether the indices ascend.

    Returns:
      [reads, ...] in the data's dtype.

    Raises:
      ValueError: `indices` has another rank than 1.
      TypeError: the indices are no integers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> reads = jnp.zeros(13_161, jnp.int32)
      >>> jax.grad(lambda x: gather(x, reads).sum().astype("float32"))(jnp.ones(1, "float16")).tolist()
      [13160.0]
    """
    data, indices = jnp.asarray(data), _integers("indices", indices)
    if data.ndim == 0:
        raise ValueError("data must have rows, got a scalar")
    return read_rows(_wide(data), indices, is_sorted=indices_are_sorted).astype(data.dtype)


def _mean(wide: jax.Array, ids: jax.Array, count: int, is_sorted: bool) -> jax.Array:
    ones = jnp.ones(ids.shape, jnp.int32)
    sizes = jraph.segment_sum(ones, _none_negative(ids, count), count)
    sizes = jnp.maximum(sizes, 1).astype(wide.dtype).reshape(-1, *[1] * (wide.ndim - 1))
    return sum_rows(wide, ids, count, is_sorted=is_sorted) / sizes


def _wide(data: jax.Array) -> jax.Array:
    """Returns floats at least in float32, all else as it is."""
    is_narrow = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4
    return data.astype(jnp.float32) if is_narrow else data


def _none_negative(ids: jax.Array, count: int) -> jax.Array:
    return jnp.where(ids < 0, count, ids)


def _checked(data: Any, segment_ids: Any, num_segments: Any) -> tuple[jax.Array, jax.Array, int]:
    data, ids = jnp.asarray(data), _integers("segment_ids", segment_ids)
    try:
        count = operator.index(num_segments)
    except TypeError:
        raise TypeError(f"num_segments={num_segments!r} must be an integer") from None
    if count < 0:
        raise ValueError(f"num_segments={count} must be at least 0")
    if data.ndim == 0 or data.shape[0] != ids.shape[0]:
        raise ValueError(
            f"data and segment_ids must have as many rows, got shapes {data.shape} and {ids.shape}"
        )
    return data, ids, count


def _integers(name: str, ids: Any) -> jax.Array:
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {ids.shape}")
    return ids if ids.dtype.itemsize == 8 else ids.astype(jnp.int32)
