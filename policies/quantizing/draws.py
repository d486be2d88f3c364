"""Random numbers of `jax.random`, bitwise, by one elementwise program on every platform.

On CPUs, `jax.random` lowers threefry to loops over arrays, which compile slowly and pass over memory 20 times.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
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
    return lax.map(functools.partial(jax.random.fold_in, key), jnp.array(numbers, jnp.uint32))


def _is_reproduced(key: jax.Array, shape: tuple[int, ...]) -> bool:
    """Returns whether `_bits` equals `jax.random`, as for threefry in its partitionable scheme, jax's default."""
    typed = key if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else jax.random.wrap_key_data(key)
    scheme = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return str(jax.random.key_impl(typed)) == "threefry2x32" and scheme and math.prod(shape) < 2**32


def _bits(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 random bits: threefry2x32 of each element's place, with its halves combined by xor.

    Reference: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
    """
    data = jax.random.key_data(key)
    keys = (data[0], data[1], data[0] ^ data[1] ^ jnp.uint32(_PARITY))
    places, stride = jnp.zeros(shape, jnp.uint32), 1
    for axis in reversed(range(len(shape))):
        places += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride)
        stride *= shape[axis]
    high, low = jnp.full(shape, keys[0]), places + keys[1]
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            high += low
            low = high ^ (low << jnp.uint32(distance) | low >> jnp.uint32(32 - distance))
        high += keys[(group + 1) % 3]
        low += keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return high ^ low
