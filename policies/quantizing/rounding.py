"""Rounds float32 to floating dtypes of fewer bits, to the nearest or stochastically, without overflow.

Random numbers are those of `jax.random`, bitwise, from one elementwise program on every platform. On CPUs, `jax.random`
lowers threefry to loops over arrays, which compile slowly and pass over memory 20 times. float8 bits are converted in
integer arithmetic, which compiles to short loops everywhere. XLA's CPU compiler would convert float8 element by element
through float16, which takes longer to compile and to run.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.pytrees import is_key

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))  # of threefry
_PARITY = 0x1BD11BDA
_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_BIAS = 127  # of float32's exponent
_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}  # the bits of NaN
_INFINITY = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}


class RowKeys(NamedTuple):
    """A random key for each row of an array, and the position of its first element in what the key draws.

    Attributes:
      words: the two words of the key, uint32[rows, 1] each.
      first: uint32[rows, 1].
    """

    words: tuple[jax.Array, jax.Array]
    first: Any


def row_keys(keys: jax.Array, chosen: np.ndarray, first: np.ndarray) -> RowKeys:
    """Returns the keys of rows.

    Args:
      keys: jax random keys, one per row of `fold_in_each`.
      chosen: the position of each row's key, [rows, 1].
      first: see `RowKeys`.
    """
    data = jax.random.key_data(keys)
    return RowKeys((data[:, 0][chosen], data[:, 1][chosen]), first)


def uniform(key: jax.Array | RowKeys, shape: tuple[int, ...]) -> jax.Array:
    """Returns `jax.random.uniform(key, shape)`, float32 in [0, 1).

    Args:
      key: a jax random key, typed or of uint32; or the keys of rows, which have to be reproduced.
      shape: shape of the result.
    """
    if not isinstance(key, RowKeys) and not is_reproduced(key, shape):
        return jax.random.uniform(key, shape)
    fraction = _bits(key, shape) >> jnp.uint32(9) | jnp.uint32(0x3F800000)
    return lax.bitcast_convert_type(fraction, jnp.float32) - 1


def bits16(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `jax.random.bits(key, shape, "uint16")`.

    Args:
      key: a jax random key, typed or of uint32.
      shape: shape of the result.
    """
    if not is_reproduced(key, shape):
        return jax.random.bits(key, shape, jnp.uint16)
    return _bits(key, shape).astype(jnp.uint16)


def fold_in_each(key: jax.Array, numbers: Sequence[int]) -> jax.Array:
    """Returns the keys `jax.random.fold_in(key, number)` of all numbers, one per row.

    Args:
      key: a jax random key, typed or of uint32.
      numbers: integers from 0 to 2**32 - 1.
    """
    each = np.array(numbers, np.uint32)
    if not is_reproduced(key, each.shape):
        return lax.map(functools.partial(jax.random.fold_in, key), jnp.asarray(each))
    return _derived(key, each)


def split_in_two(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the two keys of `jax.random.split(key)`.

    Args:
      key: a jax random key, typed or of uint32.
    """
    first, second = _derived(key, np.arange(2, dtype=np.uint32)) if is_reproduced(key, ()) else jax.random.split(key)
    return first, second


def _derived(key: jax.Array, numbers: np.ndarray) -> jax.Array:
    """Returns the keys that threefry derives from numbers, one per row."""
    keys = _keys(key)
    data = jnp.stack(_threefry(keys, jnp.full(numbers.shape, keys[0]), jnp.asarray(numbers) + keys[1]), -1)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)) if is_key(key) else data


def is_reproduced(key: jax.Array, shape: tuple[int, ...] = ()) -> bool:
    """Returns whether `_bits` equals `jax.random`, as for threefry in its partitionable scheme, jax's default."""
    typed = key if is_key(key) else jax.random.wrap_key_data(key)
    scheme = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    return str(jax.random.key_impl(typed)) == "threefry2x32" and scheme and math.prod(shape) < 2**32


def _bits(key: jax.Array | RowKeys, shape: tuple[int, ...]) -> jax.Array:
    """Returns uint32 random bits: the xor of the two halves of threefry of each element's position."""
    keys = _schedule(*key.words) if isinstance(key, RowKeys) else _keys(key)
    # The key is added first, because a compiler hoists loop invariants out of the loop and stores them.
    if isinstance(key, RowKeys):
        low = lax.broadcasted_iota(jnp.uint32, shape, 1) + (key.first + keys[1])
    else:
        low, stride = jnp.full(shape, keys[1]), 1
        for axis in reversed(range(len(shape))):
            low += lax.broadcast_in_dim(lax.iota(jnp.uint32, shape[axis]) * jnp.uint32(stride), shape, (axis,))
            stride *= shape[axis]
    high, low = _threefry(keys, jnp.broadcast_to(keys[0], shape), low)
    return high ^ low


def _keys(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns threefry's three words of a key."""
    data = jax.random.key_data(key)
    return _schedule(data[0], data[1])


def _schedule(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return first, second, first ^ second ^ jnp.uint32(_PARITY)


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


def to_float8_bits(x: jax.Array, dtype: DTypeLike, key: jax.Array | RowKeys | None = None) -> jax.Array:
    """Returns the bits of float32 rounded to a float8: uint8, in the shape of `x`.

    Args:
      x: float32 array. Its finite elements must not exceed the largest number of the dtype.
      dtype: float8_e4m3fn or float8_e5m2.
      key: a jax random key, or the keys of rows, to round stochastically; None rounds to the nearest, ties to even.
    """
    digits, shift, least = _format(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    magnitude = bits & _MAGNITUDE
    # In units of the smallest number, subnormal numbers are integers.
    units = lax.bitcast_convert_type(magnitude, jnp.float32) * np.float32(2.0 ** (digits - least))
    is_normal = magnitude >= np.uint32((least + _BIAS) << 23)
    offset = np.uint32((least + _BIAS - 1) << digits)  # of the exponents
    if key is None:
        half = ((magnitude >> np.uint32(shift)) & np.uint32(1)) + np.uint32((1 << (shift - 1)) - 1)
        normal = ((magnitude + half) >> np.uint32(shift)) - offset
        code = jnp.where(is_normal, normal, lax.round(units, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.uint32))
    else:
        rest = (magnitude & np.uint32((1 << shift) - 1)).astype(jnp.float32) * np.float32(2.0**-shift)
        below = jnp.floor(units)
        share = jnp.where(is_normal, rest, units - below)
        code = jnp.where(is_normal, (magnitude >> np.uint32(shift)) - offset, below.astype(jnp.uint32))
        code += (uniform(key, x.shape) < share).astype(jnp.uint32)
    name = jnp.dtype(dtype).name
    special = jnp.where(magnitude == np.uint32(0x7F800000), np.uint32(_INFINITY[name]), np.uint32(_NAN[name]))
    code = jnp.where(magnitude >= np.uint32(0x7F800000), special, code)
    return (code | ((bits & _SIGN) >> np.uint32(24))).astype(jnp.uint8)


def from_float8_bits(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns the float32 numbers that the bits of a float8 represent.

    Args:
      bits: uint8 array.
      dtype: float8_e4m3fn or float8_e5m2.
    """
    digits, shift, least = _format(dtype)
    wide = bits.astype(jnp.uint32)
    magnitude = wide & np.uint32(0x7F)
    normal = (magnitude << np.uint32(shift)) + np.uint32((least + _BIAS - 1) << 23)
    units = magnitude.astype(jnp.float32) * np.float32(2.0 ** (least - digits))
    number = jnp.where(magnitude >= np.uint32(1 << digits), normal, lax.bitcast_convert_type(units, jnp.uint32))
    name = jnp.dtype(dtype).name
    lost = jnp.where(magnitude == np.uint32(_INFINITY[name]), np.uint32(0x7F800000), np.uint32(0x7FC00000))
    lost = lost if _INFINITY[name] != _NAN[name] else np.uint32(0x7FC00000)
    number = jnp.where(magnitude >= np.uint32(_INFINITY[name]), lost, number)
    return lax.bitcast_convert_type(number | (wide & np.uint32(0x80)) << np.uint32(24), jnp.float32)


def _format(dtype: DTypeLike) -> tuple[int, int, int]:
    """Returns the number of mantissa bits, its difference from float32's, and the least normal exponent."""
    info = jnp.finfo(dtype)
    return info.nmant, 23 - info.nmant, int(info.minexp)


def round_to(x: jax.Array, dtype: DTypeLike, key: jax.Array | None = None) -> jax.Array:
    """Returns float32 numbers rounded to a floating dtype of 8 or 16 bits, clipped to its largest number.

    Args:
      x: float32 array of any shape. An inf stays inf, or becomes NaN if the dtype has no inf; NaN stays NaN.
      dtype: bfloat16, float16, float8_e4m3fn or float8_e5m2.
      key: a jax random key, for stochastic rounding to one of the two neighbors. The mean over many keys is then
        `x` to 2**-23 of their distance, in bfloat16 exactly. None rounds to the nearest, ties to even.

    Returns:
      An array of that dtype, in the shape of `x`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> round_to(jnp.array([1.0, -1e6]), jnp.float16).tolist()
      [1.0, -65504.0]
      >>> x = jnp.full(1000, 1 + 2.0**-9)  # a quarter of the way from 1 to 1 + 2**-7
      >>> 200 < int((round_to(x, jnp.bfloat16, jax.random.key(0)) > 1).sum()) < 300
      True

    Reference: Gupta et al., "Deep Learning with Limited Numerical Precision", https://arxiv.org/abs/1502.02551.
    """
    limited = clip_to(x, dtype)
    if jnp.dtype(dtype).itemsize == 1:
        return lax.bitcast_convert_type(to_float8_bits(limited, dtype, key), jnp.dtype(dtype))
    nearest = limited.astype(dtype)
    if key is None:
        return nearest
    if nearest.dtype == jnp.bfloat16:
        return jnp.where(jnp.isfinite(limited), _upper_half(limited, key), nearest)
    # In sign-magnitude formats, the bits of the next larger magnitude are greater by one.
    bits = lax.bitcast_convert_type(nearest, jnp.uint16)
    magnitude = jnp.abs(limited)
    inner = bits - (_magnitude(bits, dtype) > magnitude).astype(jnp.uint16)
    low, high = _magnitude(inner, dtype), _magnitude(inner + jnp.uint16(1), dtype)
    share = jnp.where(low == magnitude, 0, (magnitude - low) / (high - low))
    # In a loop, because XLA's CPU compiler would fuse a program without loops and recompute it for each use.
    outward = jax.random.uniform(key, x.shape) < share
    rounded = lax.bitcast_convert_type(inner + outward.astype(jnp.uint16), jnp.dtype(dtype))
    return jnp.where(jnp.isfinite(limited), rounded, nearest)


def clip_to(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns numbers whose finite ones do not exceed the largest number of a dtype."""
    largest = float(jnp.finfo(dtype).max)
    return jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)


def _upper_half(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 rounded stochastically to bfloat16: the upper 16 bits after adding 16 random ones."""
    draw = bits16(key, x.shape).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + draw
    return lax.bitcast_convert_type((bits >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def _magnitude(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.abs(lax.bitcast_convert_type(bits, jnp.dtype(dtype)).astype(jnp.float32))
