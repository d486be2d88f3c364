"""Variances, standard deviations and softmax aggregation of segments, in float32.

The mean of squares minus the square of the mean cancels: in float16, numbers about 30 with a
standard deviation of 0.2 have none left. Here rows are centered first, and the error of the mean is subtracted again.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jmp_train.graphs.messages.segment import checked_rows
from jmp_train.graphs.structure import as_inexact, root_or_zero, upcast, upcast_integers


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
