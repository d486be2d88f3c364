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
    """Returns floats at least in float32, all else as it is."""
    is_low_precision = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4
    return data.astype(jnp.float32) if is_low_precision else data


def upcast_integers(data: jax.Array) -> jax.Array:
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


def accumulation_dtype(dtype: DTypeLike) -> np.dtype:
    """Returns the dtype in which arrays of a dtype are computed: that of what `upcast` returns."""
    return upcast(jnp.zeros((), dtype)).dtype


def common_dtype(*dtypes: DTypeLike) -> np.dtype:
    """Returns the dtype that holds all of these, as jax promotes them where promotion is not strict."""
    with jax.numpy_dtype_promotion("standard"):
        return np.dtype(functools.reduce(jnp.promote_types, dtypes))


def is_one_precision(*operands: jax.Array | None) -> bool:
    """Whether operands, None aside, are floats that are computed in one dtype."""
    dtypes = [x.dtype for x in operands if x is not None]
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return are_floats and len({accumulation_dtype(dtype) for dtype in dtypes}) == 1


@jax.jit
def graph_storage(data: jax.Array) -> jax.Array:
    """Returns the same array, which autocast keeps in half: its tables know this function's name."""
    return jnp.copy(data)


def in_float32(compute: Callable[..., Result], *operands: jax.Array) -> Result:
    """Returns what is computed of stored operands, in float32, stored in their common dtype.

    Of integers it is stored as it was computed: they become larger ones, or floats. Integers, such as places,
    stay what they are.

    Args:
      compute: a function of the operands, which it has to upcast, to a tree of arrays.
      *operands: features in the dtypes that they are stored in.
    """
    common = common_dtype(*[operand.dtype for operand in operands])
    stored = [graph_storage(operand) for operand in operands]
    result = autocast_as("float32")(compute)(*stored)
    is_inexact = jnp.issubdtype(common, jnp.inexact)

    def store(x: jax.Array) -> jax.Array:
        return graph_storage(x.astype(common if is_inexact and jnp.issubdtype(x.dtype, jnp.inexact) else x.dtype))

    return jax.tree.map(store, result)
