"""Arrays in 8 bits: saturating casts, and the scales that make the most of their range."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

BLOCK = 32  # numbers that share a scale in the MX formats
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23  # of float32


def quantize(x: jax.Array, dtype: DTypeLike, scale: ArrayLike = 1.0) -> jax.Array:
    """Returns an array times a scale in an 8-bit type, rounded to the nearest, ties to even.

    Args:
      x: floating array.
      dtype: float8_e4m3fn, which has no infinity, or float8_e5m2.
      scale: finite and above 0; of the shape of `x` or of one that is broadcast to it.

    Returns:
      The array. Finite numbers beyond the type's range become its largest of their sign. Infinities become NaN, as NaN
      is, in both types: what has overflowed must not look like a number, or no loss scale would ever see it.

    Example:
      >>> import jax.numpy as jnp
      >>> quantize(jnp.array([1.1, 1000.0, -jnp.inf]), jnp.float8_e4m3fn).astype(jnp.float32)
      Array([  1.125, 448.   ,     nan], dtype=float32)

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
    """
    most = float(jnp.finfo(dtype).max)
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -most, most)
    return jnp.where(jnp.isfinite(x), scaled, jnp.nan).astype(dtype)


def amax_of(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude in an array as a float32 scalar, NaN if there is one; 0 of an empty array."""
    return jnp.max(jnp.abs(x), initial=0.0).astype(jnp.float32)


def scale_of(amax: jax.Array, dtype: DTypeLike, margin: int = 0, old: ArrayLike = 1.0) -> jax.Array:
    """Returns the scale that takes the largest magnitude to the end of a type's range.

    Args:
      amax: float32 array of largest magnitudes.
      dtype: an 8-bit type.
      margin: the scale is divided by 2 to the power of it.
      old: the scale to keep where `amax` is 0, infinite or NaN.

    Returns:
      float32 like `amax`, (largest number of the type / amax) / 2**margin; where float32 cannot hold that, its largest
      number.

    Example:
      >>> import jax.numpy as jnp
      >>> scale_of(jnp.array([2.0, 0.0, jnp.inf]), jnp.float8_e4m3fn, margin=1, old=4.0)
      Array([112.,   4.,   4.], dtype=float32)

    Reference: `compute_scale_from_amax` of Transformer Engine.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = float(jnp.finfo(dtype).max) / jnp.where(usable, amax, 1.0) / 2.0**margin
    return jnp.where(usable, jnp.minimum(scale, float(jnp.finfo(jnp.float32).max)), old)


def quantize_blocks(x: jax.Array, dimension: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns an array in an 8-bit type, and one scale, a power of two, for each 32 numbers along a dimension.

    Args:
      x: floating array.
      dimension: along which blocks are; the last block may have fewer than 32 numbers.
      dtype: an 8-bit type.

    Returns:
      The quantized array, of the shape of `x`, and float8_e8m0fnu scales, one for each block: what the numbers of a
      block have to be multiplied by to get back near `x`. The scale is the smallest with which no number is clipped.

    Example:
      >>> import jax.numpy as jnp
      >>> quantized, scales = quantize_blocks(jnp.array([896.0, 1.0] + 30 * [0.0] + [448.0]), 0, jnp.float8_e4m3fn)
      >>> scales.astype(jnp.float32), float(quantized[0])
      (Array([2., 1.], dtype=float32), 448.0)

    Reference: OCP Microscaling Formats (MX) Specification 1.0; Mishra et al., "Recipes for Pre-training LLMs with
    MXFP8", https://arxiv.org/abs/2506.08027, for rounding the scale up.
    """
    blocks = _in_blocks(x.astype(jnp.float32), dimension)
    amax = jnp.max(jnp.abs(blocks), axis=dimension + 1)
    ratio = lax.bitcast_convert_type(amax / float(jnp.finfo(dtype).max), jnp.uint32)
    exponent, mantissa = (ratio >> _MANTISSA_BITS) & 0xFF, ratio & (1 << _MANTISSA_BITS) - 1
    half = 1 << _MANTISSA_BITS - 1  # of a subnormal ratio: up to there 2**-127 is not below it
    exponent += (mantissa > jnp.where(exponent == 0, half, 0)).astype(jnp.uint32)
    exponent = jnp.where(jnp.isfinite(amax), exponent, _EXPONENT_BIAS)
    factor = lax.bitcast_convert_type(2 * _EXPONENT_BIAS - exponent << _MANTISSA_BITS, jnp.float32)
    quantized = quantize(blocks, dtype, jnp.expand_dims(factor, dimension + 1))
    whole = quantized.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])
    scales = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return lax.slice_in_dim(whole, 0, x.shape[dimension], axis=dimension), scales


def dequantize_blocks(quantized: jax.Array, scales: jax.Array, dimension: int) -> jax.Array:
    """Returns what `quantize_blocks` stands for in float32, which holds it exactly down to its smallest numbers.

    Args:
      quantized: the 8-bit array.
      scales: of its blocks.
      dimension: along which they are.

    Example:
      >>> import jax.numpy as jnp
      >>> dequantize_blocks(*quantize_blocks(jnp.array([3.0, 900.0]), 0, jnp.float8_e4m3fn), 0)
      Array([  3., 896.], dtype=float32)
    """
    of_each = jnp.repeat(scales.astype(jnp.float32), BLOCK, axis=dimension)
    of_each = lax.slice_in_dim(of_each, 0, quantized.shape[dimension], axis=dimension)
    return quantized.astype(jnp.float32) * of_each


def _in_blocks(x: jax.Array, dimension: int) -> jax.Array:
    """Returns an array with a dimension split into blocks and their numbers, the last block filled up with zeros."""
    missing = -x.shape[dimension] % BLOCK
    filled = lax.pad(x, jnp.zeros((), x.dtype), [(0, missing if i == dimension else 0, 0) for i in range(x.ndim)])
    return filled.reshape(*x.shape[:dimension], -1, BLOCK, *x.shape[dimension + 1 :])
