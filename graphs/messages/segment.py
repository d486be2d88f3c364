"""Segment operations that compute in float32, forward and backward.

They take the same arguments as jraph's. In float16 a running sum of ones ends at 2,048, in bfloat16 at 256, without any
NaN; here arrays may be stored in half precision, and sums are computed in float32. The largest and the least rows are
exact in half precision.

In a variance, the mean of squares minus the square of the mean cancels: in float16, numbers about 30 with a standard
deviation of 0.2 have none left. Here rows are centered first, and the error of the mean is subtracted again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jmp_train.graphs.structure import (
    Incidence,
    as_array,
    as_count,
    as_inexact,
    as_int32_ids,
    check_known,
    computed_once,
    incidence_of,
    root_or_zero,
    rows_like,
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
      ValueError: `data` and `segment_ids` differ in length, `num_segments` is negative, or NumPy's 64-bit integers do
        not fit into the 32 bits that JAX has without `jax_enable_x64`.
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
      ValueError: `data` is a scalar, or see `segment_sum`.
      TypeError: the indices are not integers.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> reads = jnp.zeros(13_161, jnp.int32)
      >>> jax.grad(lambda x: gather(x, reads).sum().astype("float32"))(jnp.ones(1, "float16")).tolist()
      [13160.0]
    """
    data, indices = as_array("data", data), as_int32_ids("indices", indices)
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
    data, ids = as_array("data", data), checked_ids_of_rows("segment_ids", segment_ids)
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
    """Returns ids as int32 [rows], checked; see `as_int32_ids`."""
    found = as_int32_ids(name, ids)
    if found.ndim != 1:
        raise ValueError(f"{name} must have one axis, got shape {found.shape}")
    return found


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


class Moments(NamedTuple):
    """The mean and the variance of each segment, as `segment_moments` returns them.

    Attributes:
      mean: [segments, ...].
      variance: [segments, ...].

    Example:
      >>> import jax.numpy as jnp
      >>> segment_moments(jnp.array([1.0, 3.0]), jnp.array([0, 0]), 1)
      Moments(mean=Array([2.], dtype=float32), variance=Array([1.], dtype=float32))
    """

    mean: jax.Array
    variance: jax.Array


def segment_moments(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> Moments:
    """Returns the mean and the variance of each segment, elementwise; 0 of those without rows.

    Args:
      data: [rows, ...]; those of integers are floats.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      Two arrays [num_segments, ...] in the data's floating dtype. The variance is that of all rows of a segment,
      divided by their number.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> rows, ids = jnp.array([30.0, 30.25, 7.0], jnp.float16), jnp.array([0, 0, 1])
      >>> [x.tolist() for x in segment_moments(rows, ids, 2)]
      [[30.125, 7.0], [0.015625, 0.0]]

    Reference: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = as_inexact(data)
    return Moments(*(x.astype(data.dtype) for x in segments.moments(upcast(data))))


def segment_var(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the variance of each segment, elementwise; see `segment_moments`.

    Args:
      data: see `segment_moments`.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's floating dtype.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_var(jnp.array([1.0, 3.0, 5.0]), jnp.array([0, 0, 1]), 3).tolist()
      [1.0, 0.0, 0.0]
    """
    return segment_moments(data, segment_ids, num_segments, indices_are_sorted=indices_are_sorted).variance


def segment_std(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the standard deviation of each segment, elementwise; 0 of those without rows.

    Args:
      data: see `segment_moments`.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's floating dtype. The root is taken before rounding, so that the standard
      deviation overflows only if the data do. Where all rows are equal its gradient is 0.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> segment_std(jnp.array([6e4, -6e4, 5.0], jnp.float16), jnp.array([0, 0, 1]), 2).tolist()
      [60000.0, 0.0]
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = as_inexact(data)
    return root_or_zero(segments.moments(upcast(data))[1]).astype(data.dtype)


def segment_softmax_sum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
    temperature: ArrayLike = 1.0,
    *,
    indices_are_sorted: bool = False,
) -> jax.Array:
    """Returns the rows of each segment, summed with the softmax of temperature times themselves as weights.

    Args:
      data: [rows, ...]; results of integers are floats.
      segment_ids: see `segment_sum`.
      num_segments: see `segment_sum`.
      temperature: a number, or an array that broadcasts to a row, such as one for each feature, which has a gradient.
      indices_are_sorted: see `segment_sum`.

    Returns:
      [num_segments, ...] in the data's floating dtype, 0 of segments without rows.

    Raises:
      ValueError: see `segment_sum`.
      TypeError: see `segment_sum`.

    Example:
      >>> import jax.numpy as jnp
      >>> rows, ids = jnp.array([0.0, 1.0, 5.0]), jnp.array([0, 0, 1])
      >>> [segment_softmax_sum(rows, ids, 2, t).tolist() for t in (0.0, 100.0)]
      [[0.5, 5.0], [1.0, 5.0]]

    Reference: Li et al., DeeperGCN, https://arxiv.org/abs/2006.07739; PyTorch Geometric's SoftmaxAggregation.
    """
    data, segments = checked_rows(data, segment_ids, num_segments, indices_are_sorted)
    data = as_inexact(data)
    rows = upcast(data)
    return segments.softmax_sum(rows, jnp.asarray(temperature).astype(rows.dtype)).astype(data.dtype)


def segment_argmax(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
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
    return segments.argmax(jax.lax.optimization_barrier(upcast(data)))


def segment_argmin(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
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
    return segments.argmin(jax.lax.optimization_barrier(upcast(data)))


def segment_cumsum(
    data: ArrayLike,
    segment_ids: ArrayLike,
    num_segments: int | None = None,
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
