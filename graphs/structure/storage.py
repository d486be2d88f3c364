"""Dtypes of graph features: half precision in storage, float32 in computation."""

import functools
from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_train.policies.autocasting import autocast_as

Result = TypeVar("Result")


def upcast(data: jax.Array) -> jax.Array:
    """Returns floats in float32 or higher precision, other arrays unchanged."""
    is_low_precision = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4
    return data.astype(jnp.float32) if is_low_precision else data


def upcast_integers(data: jax.Array) -> jax.Array:
    """Returns booleans and integers in at least 32 bits, as `jnp.sum` adds them, other arrays unchanged."""
    if jnp.issubdtype(data.dtype, jnp.inexact) or data.dtype.itemsize >= 4:
        return data
    is_unsigned = jnp.issubdtype(data.dtype, jnp.unsignedinteger)
    return data.astype(jnp.uint32 if is_unsigned else jnp.int32)


def as_inexact(data: jax.Array) -> jax.Array:
    """Returns booleans and integers as floats, like their means, other arrays unchanged."""
    if jnp.issubdtype(data.dtype, jnp.inexact):
        return data
    return data.astype(jnp.float64 if data.dtype.itemsize == 8 else jnp.float32)


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which arrays of a dtype are computed, as by `upcast`."""
    is_low_precision = jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize < 4
    return np.dtype(np.float32 if is_low_precision else dtype)


def common_dtype(*dtypes: DTypeLike) -> np.dtype:
    """Returns the common dtype of several, as jax promotes them without strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))


def is_one_precision(*operands: jax.Array | None) -> bool:
    """Returns whether operands, except None, are floats that are computed in one dtype."""
    dtypes = [x.dtype for x in operands if x is not None]
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return are_floats and len({accumulation_dtype(dtype) for dtype in dtypes}) == 1


@jax.jit
def graph_storage(data: jax.Array) -> jax.Array:
    """Returns the same array, which autocast stores in half precision: its tables have this function's name."""
    return jnp.copy(data)


def in_float32(compute: Callable[..., Result], *operands: jax.Array) -> Result:
    """Returns the result of a float32 computation on stored operands, stored in their common dtype.

    For integer operands, the result keeps its computed dtype, a larger integer or a float. Integer results, such as
    places, are unchanged.

    Args:
      compute: a function that upcasts the operands and returns a tree of arrays.
      *operands: features in their stored dtypes.
    """
    common = common_dtype(*[operand.dtype for operand in operands])
    stored = [graph_storage(operand) for operand in operands]
    result = autocast_as("float32")(compute)(*stored)
    is_inexact = jnp.issubdtype(common, jnp.inexact)

    def store(x: jax.Array) -> jax.Array:
        return graph_storage(x.astype(common if is_inexact and jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype))

    return jax.tree.map(store, result)
