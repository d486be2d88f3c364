"""Converts float8 bits from and to float32 in integer arithmetic, which compiles to short loops everywhere.

XLA's CPU compiler converts float8 element by element through float16, which takes longer to compile and to run.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.quantizing.draws import uniform

_SIGN, _MAGNITUDE = np.uint32(0x80000000), np.uint32(0x7FFFFFFF)
_BIAS = 127  # of float32's exponent
_NAN = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7E}  # the bits of NaN
_INFINITY = {"float8_e4m3fn": 0x7F, "float8_e5m2": 0x7C}


def to_float8_bits(x: jax.Array, dtype: DTypeLike, key: jax.Array | None = None) -> jax.Array:
    """Returns the bits of float32 rounded to a float8: uint8, in the shape of `x`.

    Args:
      x: float32 array. Its finite elements must not exceed the largest number of the dtype.
      dtype: float8_e4m3fn or float8_e5m2.
      key: a jax random key, to round stochastically; None rounds to the nearest, ties to even.
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
    """Returns the number of mantissa bits, how many fewer that is than in float32, and the least normal exponent."""
    info = jnp.finfo(dtype)
    return info.nmant, 23 - info.nmant, int(info.minexp)
