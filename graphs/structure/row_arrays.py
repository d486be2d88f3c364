"""Small functions on node arrays: broadcasts of scales, first rows, divisions by possible zeros."""

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure.storage import accumulation_dtype


def rows_like(column: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a column [rows] with axes added for broadcasting with an array [rows, ...]."""
    return column.reshape(-1, *[1] * (array.ndim - 1))


def first_rows(rows: jax.Array, count: int) -> jax.Array:
    """Returns the first of some rows, or the same array if these are all."""
    return rows if count == rows.shape[0] else rows[:count]


def finite_or_zero(data: jax.Array) -> jax.Array:
    """Returns data with 0 for infinities, as for the largest logits if all are masked."""
    return jnp.where(jnp.isfinite(data), data, jnp.zeros_like(data))


def equal_or_nan(data: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns where data are equal to `wanted`, or both are NaN."""
    return (data == wanted) | (jnp.isnan(data) & jnp.isnan(wanted))


def reciprocal(data: jax.Array) -> jax.Array:
    """Returns 1 divided by data, and 1 where they are 0."""
    return 1 / jnp.where(data == 0, jnp.ones_like(data), data)


def inverse_degrees(degrees: jax.Array, features: jax.Array) -> jax.Array:
    """Returns 1 divided by degrees, with 0 counted as 1, in the dtype in which features are computed."""
    return 1 / jnp.maximum(degrees, 1).astype(accumulation_dtype(features.dtype))


def root_or_zero(data: jax.Array) -> jax.Array:
    """Returns the square roots of data; 0 where data are not positive, with gradient 0 instead of infinity."""
    has_no_root = data <= 0  # NaN stays
    return jnp.where(has_no_root, jnp.zeros_like(data), jnp.sqrt(jnp.where(has_no_root, jnp.ones_like(data), data)))


def moments_about(shift: jax.Array, rest: jax.Array, square: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean and the variance of numbers from their moments about a number near the mean.

    Up to rounding, the result does not depend on that number, so it needs no gradient. Its difference from the
    mean is subtracted again, which corrects the mean's own rounding.

    Args:
      shift: the number.
      rest: the mean of the differences to it.
      square: the mean of their squares.

    Reference: Chan, Golub and LeVeque, Algorithms for Computing the Sample Variance, 1983.
    """
    variance = square - rest * rest
    return shift + rest, jnp.where(variance < 0, jnp.zeros_like(variance), variance)
