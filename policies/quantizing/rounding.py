"""Rounds float32 to floating dtypes of fewer bits, to the nearest or stochastically, without overflow."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.quantizing.draws import bits16
from jmp_train.policies.quantizing.float8_bits import to_float8_bits


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
    largest = float(jnp.finfo(dtype).max)
    limited = jnp.where(jnp.isfinite(x), jnp.clip(x, -largest, largest), x)
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


def _upper_half(x: jax.Array, key: jax.Array) -> jax.Array:
    """Returns float32 rounded stochastically to bfloat16, its upper half: adding a random lower half may carry."""
    draw = bits16(key, x.shape).astype(jnp.uint32)
    bits = lax.bitcast_convert_type(x, jnp.uint32) + draw
    return lax.bitcast_convert_type((bits >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)


def _magnitude(bits: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jnp.abs(lax.bitcast_convert_type(bits, jnp.dtype(dtype)).astype(jnp.float32))
