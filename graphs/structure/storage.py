"""Half in memory, float32 in computation: the two moves between them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp


def wide(data: jax.Array) -> jax.Array:
    """Returns floats at least in float32, all else as it is."""
    is_narrow = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4
    return data.astype(jnp.float32) if is_narrow else data


def wide_integers(data: jax.Array) -> jax.Array:
    """Returns booleans and integers in 32 bits at least, as `jnp.sum` adds them, all else as it is."""
    if jnp.issubdtype(data.dtype, jnp.inexact) or data.dtype.itemsize >= 4:
        return data
    is_unsigned = jnp.issubdtype(data.dtype, jnp.unsignedinteger)
    return data.astype(jnp.uint32 if is_unsigned else jnp.int32)


def as_inexact(data: jax.Array) -> jax.Array:
    """Returns booleans and integers as floats, as means of them are, all else as it is."""
    if jnp.issubdtype(data.dtype, jnp.inexact):
        return data
    return data.astype(jnp.float64 if data.dtype.itemsize == 8 else jnp.float32)


def wide_dtype(dtype: Any) -> Any:
    """Returns the dtype in which arrays of a dtype are computed: that of what `wide` returns."""
    return wide(jnp.zeros((), dtype)).dtype


def common_dtype(*dtypes: Any) -> Any:
    """Returns the dtype that holds all of these, as jax promotes them where promotion is not strict."""
    with jax.numpy_dtype_promotion("standard"):
        return functools.reduce(jnp.promote_types, dtypes)


@jax.jit
def graph_storage(data: jax.Array) -> jax.Array:
    """Returns the same array, which autocast keeps in half: its tables know this function's name."""
    return jnp.copy(data)
