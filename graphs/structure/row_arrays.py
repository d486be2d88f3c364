"""Small functions on node arrays: broadcast of scales, first rows, divisions by what may be 0."""

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure.storage import accumulation_dtype


def rows_like(column: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a column [rows] with the axes that it needs beside an array [rows, ...]."""
    return column.reshape(-1, *[1] * (array.ndim - 1))


def first_rows(rows: jax.Array, count: int) -> jax.Array:
    """Returns the first of some rows; where that is all, they themselves."""
    return rows if count == rows.shape[0] else rows[:count]


def finite_or_zero(data: jax.Array) -> jax.Array:
    """Returns data with 0 for infinities, which largest logits have where all are masked."""
    return jnp.where(jnp.isfinite(data), data, jnp.zeros_like(data))


def reciprocal(data: jax.Array) -> jax.Array:
    """Returns 1 over data, 1 where they are 0."""
    return 1 / jnp.where(data == 0, jnp.ones_like(data), data)


def inverse_degrees(degrees: jax.Array, features: jax.Array) -> jax.Array:
    """Returns 1 over degrees, those of 0 counted as 1, in the dtype in which features are computed."""
    return 1 / jnp.maximum(degrees, 1).astype(accumulation_dtype(features.dtype))
