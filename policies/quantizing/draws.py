"""Random numbers of `jax.random`, bitwise, by one elementwise program on every platform.

On CPUs, `jax.random` lowers threefry to loops over arrays, which compile slowly and pass over memory 20 times.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def uniform(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `jax.random.uniform(key, shape)`, float32 in [0, 1).

    Args:
      key: a jax random key, typed or of uint32.
      shape: shape of the result.
    """
    if not _is_reproduced(key, shape):
        return jax.random.uniform(key, shape)
    fraction = _bits(key, shape) >> jnp.uint32(9) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(fraction, jnp.float32) - 1


def bits16(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `jax.random.bits(key, shape, "uint16")`.

    Args:
      key: a jax random key, typed or of uint32.
      shape: shape of the result.
    """
    if not _is_reproduced(key, shape):
        return jax.random.bits(key, shape, jnp.uint16)
    return _bits(key, shape).astype(jnp.uint16)


def fold_in_each(key: jax.Array, numbers: Sequence[int]) -> jax.Array:
    """Returns the keys `jax.random.fold_in(key, number)` of all numbers, one per row.

    Args:
      key: a jax random key, typed or of uint32.
      numbers: integers from 0 to 2**32 - 1.
    """
    each = np.array(numbers, np.uint32)
    if not _is_reproduced(key, each.shape):
        return lax.map(functools.partial(jax.random.fold_in, key), jnp.asarray(each))
    return _derived(key, each)


def split_in_two(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two keys of `jax.random.split(key)`.

    Args:
      key: a jax random key, typed or of uint32.
    """
    first, second = _derived(key, np.arange(2, dtype=np.uint32)) if _is_reproduced(key, ()) else jax.random.split(key)
    return first, second


def _derived(key: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Returns the keys that threefry derives from numbers, one per row."""
    keys = _keys(key)
    data = jnp.stack(_threefry(keys, jnp.full(numbers.shape, keys[0]), jnp.asarray(numbers) + keys[1]), -1)
    is_typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)) if is_typed else data


def _is_reproduced(key: jax.Array, shape: tuple[int, ...]) -> bool:
    """Returns whether `_bits` equals `jax.random`, as for threefry in its partitionable scheme, jax's default."""
    typed = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    scheme = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return str(jax.random.key_impl(typed)) == "threefry2x32" and scheme and math.prod(shape) < 2**32


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 random bits: the xor of the two halves of threefry of each element's position."""
    keys = _keys(key)
    # The key is added first, because a compiler hoists loop invariants out of the loop and stores them.
    low, stride = jnp.full(shape, keys[1]), 1
    for axis in reversed(range(len(shape))):
        low += lax.broadcast_in_dim(lax.iota(jnp.uint32, shape[axis]) * jnp.uint32(stride), shape, (axis,))
        stride *= shape[axis]
    high, low = _threefry(keys, jnp.full(shape, keys[0]), low)
    return high ^ low


def _keys(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns threefry's three words of a key."""
    data = jax.random.key_data(key)
    return data[0], data[1], data[0] ^ data[1] ^ jnp.uint32(_PARITY)


def _threefry(keys: Sequence[jax.Array], high: jax.Array, low: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two halves of threefry2x32 of numbers.

    Args:
      keys: see `_keys`.
      high: upper halves of the numbers, to which the first key is added.
      low: lower halves, to which the second one is added.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            high += low
            low = high ^ (low << jnp.uint32(distance) | low >> jnp.uint32(32 - distance))
        high += keys[(group + 1) % 3]
        low += keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return high, low
