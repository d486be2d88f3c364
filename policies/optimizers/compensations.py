"""Numbers in half precision with the rest of a float32 number next to them, for `with_kahan`."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.policies.optimizers.stored_parameters import difference
from jmp_train.policies.pytrees import is_float_array
from jmp_train.policies.quantizing import uniform

EXACT = {"bfloat16": "uint16", "float16": "int16"}  # the default compensations of parameters
_STEPS = {"int8": 2.0**8, "int16": 2.0**15}  # units of a compensation from one half-precision number to the next
_UPPER, _LOWER = np.uint32(0xFFFF0000), np.uint32(0x0000FFFF)
_INFINITY, _MAGNITUDE = np.uint32(0x7F800000), np.uint32(0x7FFFFFFF)


def is_compensated(x: object) -> bool:
    """Returns whether a parameter is in half precision."""
    return is_float_array(x) and x.dtype in (jnp.bfloat16, jnp.float16)


def no_compensation(x: jax.Array, dtype: str | None) -> jax.Array:
    """Returns the compensation of a parameter that is its float32 value; `dtype` is None for the exact one."""
    return jnp.zeros_like(x, dtype or EXACT[x.dtype.name]) if is_compensated(x) else jnp.zeros((), jnp.result_type(x))


def fits(x: jax.Array, compensation: jax.Array) -> bool:
    """Returns whether a compensation has a dtype for this parameter."""
    if not is_compensated(x):
        return compensation.dtype == x.dtype
    return compensation.dtype.name in (x.dtype.name, EXACT[x.dtype.name], "int8")


def compensated(x: jax.Array, compensation: jax.Array) -> jax.Array:
    """Returns the float32 value of a parameter and its compensation."""
    if not is_compensated(x):
        return x
    if compensation.dtype == jnp.uint16:
        return _joined(x, compensation)
    rest = compensation.astype(jnp.float32)
    return x.astype(jnp.float32) + (rest * _unit(x, compensation.dtype) if compensation.dtype.name in _STEPS else rest)


def stored(
    old: jax.Array, old_sum: jax.Array, new_sum: jax.Array, compensation: jax.Array, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns a parameter and its compensation after a step.

    Args:
      old: the parameter.
      old_sum: its float32 value.
      new_sum: the next float32 value.
      compensation: the old compensation.
      key: a jax random key to round int8 stochastically; None rounds to the nearest.
    """
    if not is_compensated(old):
        return new_sum, compensation
    if compensation.dtype == jnp.uint16:
        new, rest = _split(new_sum)
    else:
        new, rest = _rounded(old, new_sum, compensation.dtype, key)
    same = lax.bitcast_convert_type(new_sum, jnp.uint32) == lax.bitcast_convert_type(old_sum, jnp.uint32)
    return jnp.where(same, old, new), jnp.where(same, compensation, rest)


def _split(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the nearest bfloat16 of float32 numbers and their lower halves as uint16, which determine the numbers.

    Ties have the larger magnitude, because ties to even would not be unique. A NaN loses its lower half.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    is_nan = bits & _MAGNITUDE > _INFINITY
    bits = jnp.where(is_nan, (bits | np.uint32(0x00400000)) & _UPPER, bits)
    upper = (bits + np.uint32(0x8000)) >> np.uint32(16)
    return lax.bitcast_convert_type(upper.astype(jnp.uint16), jnp.bfloat16), (bits & _LOWER).astype(jnp.uint16)


def _joined(x: jax.Array, lower: jax.Array) -> jax.Array:
    """Returns the inverse of `_split`; whatever the lower half is, a number that `_split` rounds to `x`."""
    upper = lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) << np.uint32(16)
    rounded_up = lower >= np.uint16(0x8000)
    bits = (upper | lower.astype(jnp.uint32)) - jnp.where(rounded_up, np.uint32(0x10000), np.uint32(0))
    # Zero is not rounded up, and infinity not down. These pairs come from parameters that others have set.
    magnitude = upper & _MAGNITUDE
    wrong = jnp.where(rounded_up, magnitude == 0, magnitude >= _INFINITY)
    return lax.bitcast_convert_type(jnp.where(wrong, upper, bits), jnp.float32)


def _rounded(
    old: jax.Array, new_sum: jax.Array, dtype: jnp.dtype, key: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the stored number nearest to a float32 number, and the rest in a dtype."""
    nearest, total = new_sum.astype(old.dtype), new_sum
    if dtype.name in _STEPS:
        unit = _unit(nearest, dtype)
        share = _finite((new_sum - nearest.astype(jnp.float32)) / unit)
        below = jnp.floor(share)
        draw = np.float32(0.5) if key is None else 1 - uniform(key, share.shape)  # above 0
        total = nearest.astype(jnp.float32) + (below + (draw <= share - below).astype(jnp.float32)) * unit
        if dtype == jnp.int8:  # has no 128: the middle between two numbers is that many below the upper one
            nearest = (total + unit / 2).astype(old.dtype)
    if dtype.name != EXACT[old.dtype.name]:
        # The parameter is the result of apply_updates, whose float32 update can lose bits of small numbers. The
        # compensation contains these bits too.
        nearest = (old.astype(jnp.float32) + difference(nearest, old)).astype(old.dtype)
    # Without the barrier a compiler may remove the rounding, and with it the compensation.
    new = lax.optimization_barrier(nearest)
    rest = _finite(total - new.astype(jnp.float32))
    if dtype.name in _STEPS:
        limits = jnp.iinfo(dtype)
        rest = jnp.clip(jnp.round(rest / _unit(new, dtype)), limits.min, limits.max)
    return new, rest.astype(dtype)


def _unit(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Returns the unit of a compensation in integers: a fraction of the distance from a number to the next larger one.

    It is a power of two, so float32 multiplies and divides by it exactly.
    """
    steps = _STEPS[dtype.name]
    magnitude = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32) & np.uint32(0x7F800000)
    magnitude = lax.bitcast_convert_type(jnp.minimum(magnitude, np.uint32(0x7F000000)), jnp.float32)
    unit = magnitude * (float(jnp.finfo(x.dtype).eps) / steps)
    # At least the distance between float16's subnormal numbers, and a number whose inverse float32 represents.
    least = float(jnp.finfo(x.dtype).smallest_subnormal) / steps
    return jnp.maximum(unit, max(least, 2.0**-126))


def _finite(x: jax.Array) -> jax.Array:
    return jnp.where(jnp.isfinite(x), x, 0)
