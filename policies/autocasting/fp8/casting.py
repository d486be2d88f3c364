"""Scales and saturating casts of the operands of products in few bits."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies.autocasting.fp8.recipes import E2M1, E4M3, E8M0, Scaling
from jmp_train.policies.pytrees import is_key
from jmp_train.policies.quantizing import uniform

_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23  # of float32
_LARGEST_SCALE = 2.0**126  # whose inverse is a normal number; XLA's CPU compiler flushes others to 0
_LARGEST_OF_TENSOR = 2.0**112  # next to scales of blocks, so that both together are finite
_SMALLEST_CODE = 2.0**-14  # below all but 0, with which any number is 0; divided by it, a scale of a tensor is finite
_ODD = np.uint32(0x9E3779B1)  # spreads the bits of amax, of which many end in zeros
_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)  # Transformer Engine's, drawn once

Draw = tuple[jax.Array, Any]  # a random key and the number of a product


class Quantized(NamedTuple):
    """An operand in few bits: `array` times `blocks`, if there are any, times `inverse` is the operand.

    Attributes:
      array: in 8 or 4 bits, with contracted dimensions last. Zeros fill up the last of several blocks.
      inverse: float32, with length 1 where a scale is shared.
      blocks: scales of the blocks of the last dimension; None without blocks.
      amax: float32 scalar, the operand's largest magnitude.
    """

    array: jax.Array
    inverse: jax.Array
    blocks: jax.Array | None
    amax: jax.Array


@functools.partial(jax.jit, static_argnames=("contracted", "scaling", "dtype", "leading"))
def quantized(
    x: jax.Array,
    contracted: int,
    scaling: Scaling,
    dtype: DTypeLike,
    *,
    leading: int = 0,
    scale: jax.Array | None = None,
    draw: Draw | None = None,
) -> Quantized:
    """Returns an operand in few bits.

    Args:
      x: floating array whose last dimensions are contracted.
      contracted: the number of these.
      scaling: which numbers share a scale.
      dtype: float8_e4m3fn, float8_e5m2, float4_e2m1fn or int8.
      leading: the number of first dimensions that are batches, or 1 for the groups of a ragged product.
      scale: the scale, if it is known in advance.
      draw: to round stochastically, a jax random key and a number; another number or another largest magnitude draws
        other bits.
    """
    if scaling.terms:
        return _in_blocks(x, x.ndim - contracted, scaling, dtype, leading, draw)
    axes = tuple(range(leading if scaling.whole else x.ndim - contracted, x.ndim))
    amax = lax.expand_dims(lax.reduce_max(lax.abs(x.astype(jnp.float32)), axes), axes)
    if scale is None:
        scale, inverse = _scale_and_inverse(amax, largest_of(dtype), _LARGEST_SCALE)
    else:
        scale = jnp.minimum(scale.reshape((1,) * x.ndim), _LARGEST_SCALE)
        inverse = 1.0 / scale
    if dtype == jnp.int8:  # it has no NaN
        inverse = jnp.where(amax < jnp.inf, inverse, jnp.nan)
    amax = jnp.max(amax, initial=0.0)
    return Quantized(quantize(x, dtype, scale, _folded(draw, amax)), inverse, None, amax)


def _in_blocks(
    x: jax.Array, free: int, scaling: Scaling, dtype: DTypeLike, leading: int, draw: Draw | None
) -> Quantized:
    """Returns an operand with one scale per block; `free` dimensions come before the contracted ones."""
    axis, tiled = free - 1, scaling.rows > 1 and free > leading
    terms = min(scaling.terms, max(x.shape[-1], 1))
    blocks = _split(x.astype(jnp.float32), x.ndim - 1, terms)
    blocks = _split(blocks, axis, scaling.rows) if tiled else blocks
    amax = jnp.max(jnp.abs(blocks), axis=(axis + 1, -1) if tiled else -1, keepdims=True)
    whole = jnp.max(amax, axis=tuple(range(leading, amax.ndim)), keepdims=True, initial=0.0)
    codes, factor, inverse = _scales_of_blocks(amax, whole, scaling, dtype)
    largest = jnp.max(whole, initial=0.0)
    array = quantize(blocks, dtype, factor, _folded(draw, largest))
    codes = jnp.broadcast_to(codes, (*array.shape[:-1], 1))
    if tiled:
        array, codes = (_joined(a, axis, x.shape[axis]) for a in (array, codes))
    array = array.reshape(*x.shape[:-1], codes.shape[-2] * terms)
    return Quantized(array, inverse.reshape(inverse.shape[: x.ndim]), lax.squeeze(codes, (codes.ndim - 1,)), largest)


def _scales_of_blocks(amax: jax.Array, whole: jax.Array, scaling: Scaling, dtype: DTypeLike) -> tuple[Any, Any, Any]:
    """Returns the scales of blocks as they are stored, the factors of their numbers and the scale of the tensor."""
    one = jnp.ones((1,) * whole.ndim)
    if scaling.dtype == E8M0:
        exponent = _exponent_above(amax / largest_of(dtype))
        factor = lax.bitcast_convert_type(2 * _EXPONENT_BIAS - exponent << _MANTISSA_BITS, jnp.float32)
        return lax.bitcast_convert_type(exponent.astype(jnp.uint8), E8M0), factor, one
    if scaling.dtype == E4M3:
        tensor, inverse = _scale_and_inverse(whole, largest_of(dtype) * largest_of(E4M3), _LARGEST_OF_TENSOR)
        codes = quantize(amax / largest_of(dtype), E4M3, tensor)  # NaN of what is not finite
        decoded = codes.astype(jnp.float32)
        return codes, tensor / jnp.maximum(decoded, _SMALLEST_CODE), inverse
    factor, inverse = _scale_and_inverse(amax, largest_of(dtype), _LARGEST_SCALE)
    return inverse, factor, one


def _scale_and_inverse(amax: jax.Array, most: float, largest: float) -> tuple[jax.Array, jax.Array]:
    """Returns the scales that map magnitudes to `most`, and what restores the numbers; 1 of zeros, infinity and NaN.

    A compiler fuses the second one with its readers, because it is no quotient.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = jnp.minimum(most / jnp.where(usable, amax, 1.0), largest)
    inverse = jnp.maximum(amax * np.float32(1 / most), 1 / largest)
    return jnp.where(usable, scale, 1.0), jnp.where(usable, inverse, 1.0)


def _exponent_above(ratio: jax.Array) -> jax.Array:
    """Returns the biased exponents of the smallest powers of two that are not below positive numbers."""
    bits = lax.bitcast_convert_type(ratio, jnp.uint32)
    exponent, mantissa = (bits >> _MANTISSA_BITS) & 0xFF, bits & (1 << _MANTISSA_BITS) - 1
    exponent += (mantissa > 0).astype(jnp.uint32)
    exponent = jnp.maximum(exponent, 1)  # XLA's CPU compiler flushes subnormal scales to 0
    return jnp.where(jnp.isfinite(ratio), exponent, _EXPONENT_BIAS)


def dequantized(operand: Quantized) -> jax.Array:
    """Returns the array times the scales of its blocks: in bfloat16, which holds them exactly, or float32."""
    codes: Any = operand.blocks
    dtype = jnp.float32 if codes.dtype == jnp.float32 else jnp.bfloat16
    terms = operand.array.shape[-1] // max(codes.shape[-1], 1)
    return operand.array.astype(dtype) * jnp.repeat(codes.astype(dtype), terms, axis=-1)


def quantize(x: jax.Array, dtype: DTypeLike, scale: ArrayLike = 1.0, key: jax.Array | None = None) -> jax.Array:
    """Returns an array times a scale, rounded to the nearest value of a type of few bits, ties to even.

    Args:
      x: floating array.
      dtype: float8_e4m3fn and float4_e2m1fn, which have no infinity, float8_e5m2, or int8.
      scale: finite and positive, with a shape that broadcasts to the shape of `x`.
      key: a jax random key to round stochastically, so that the mean over many keys is `x` times the scale.

    Returns:
      The quantized array. Finite numbers beyond the type's range become its largest number of the same sign. Infinities
      become NaN in both float8 types, and NaN stays NaN, so that a loss scale can detect an overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> quantize(jnp.array([1.1, 1000.0, -jnp.inf]), jnp.float8_e4m3fn).astype(jnp.float32)
      Array([  1.125, 448.   ,     nan], dtype=float32)

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
    """
    most = largest_of(dtype)
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -most, most)
    scaled = jnp.where(jnp.isfinite(x), scaled, 0.0 if dtype == jnp.int8 else jnp.nan)
    return to_few_bits(scaled, key, dtype=jnp.dtype(dtype))


@functools.partial(jax.jit, static_argnames="dtype")
def to_few_bits(x: jax.Array, key: jax.Array | None = None, *, dtype: Any) -> jax.Array:
    """Returns float32 numbers within the range of a type of few bits, rounded to it.

    This is all of the rounding: without it, a product in few bits is one of float32. `diagnose` knows it by its name.

    Args:
      x: float32 array; for int8, without NaN.
      key: see `quantize`.
      dtype: see `quantize`.
    """
    if dtype == jnp.int8:
        return lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN).astype(dtype)
    if dtype == E2M1 or key is not None:
        x = jnp.where(jnp.isnan(x), x, _on_grid(x, dtype, key))
    return x.astype(dtype)


def _on_grid(x: jax.Array, dtype: DTypeLike, key: jax.Array | None) -> jax.Array:
    """Returns numbers within the range of a floating type, rounded to its values."""
    info = jnp.finfo(dtype)
    exponent = (lax.bitcast_convert_type(x, jnp.int32) >> _MANTISSA_BITS) & 0xFF
    exponent = jnp.maximum(exponent, int(info.minexp) + _EXPONENT_BIAS) - info.nmant
    step = lax.bitcast_convert_type(exponent << _MANTISSA_BITS, jnp.float32)  # between two values
    steps = jnp.abs(x) / step
    nearest = lax.round(steps, lax.RoundingMethod.TO_NEAREST_EVEN)
    steps = nearest if key is None else jnp.floor(steps + uniform(key, x.shape))
    return jnp.copysign(steps * step, x)


def largest_of(dtype: DTypeLike) -> float:
    """Returns the largest number of a type of few bits, 127 of int8."""
    return 127.0 if dtype == jnp.int8 else float(jnp.finfo(dtype).max)


def scale_of(amax: jax.Array, dtype: DTypeLike, margin: int = 0, old: ArrayLike = 1.0) -> jax.Array:
    """Returns the scale that maps the largest magnitude to the largest number of a type.

    Args:
      amax: float32 array of largest magnitudes.
      dtype: a type of few bits.
      margin: the scale is divided by `2**margin`.
      old: the scale to use where `amax` is 0, infinite or NaN.

    Returns:
      float32 array of the shape of `amax`: (largest number of the type / amax) / 2**margin, at most the largest number
      of float32.

    Example:
      >>> import jax.numpy as jnp
      >>> scale_of(jnp.array([2.0, 0.0, jnp.inf]), jnp.float8_e4m3fn, margin=1, old=4.0)
      Array([112.,   4.,   4.], dtype=float32)

    Reference: `compute_scale_from_amax` of Transformer Engine.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = largest_of(dtype) / jnp.where(usable, amax, 1.0) / 2.0**margin
    return jnp.where(usable, jnp.minimum(scale, float(jnp.finfo(jnp.float32).max)), old)


def spread(x: jax.Array) -> jax.Array:
    """Returns a Hadamard transform of each 16 numbers of the last dimension, filled up with zeros.

    Both operands of a product, transformed along the contracted dimension, have the same product.

    Args:
      x: floating array.
    """
    signs = np.array(_SIGNS, np.float32)
    matrix = functools.reduce(np.kron, [np.array([[1, 1], [1, -1]], np.float32)] * 4) * signs[:, None] / 4
    blocks = _split(x.astype(jnp.float32), x.ndim - 1, len(signs))
    moved = jnp.matmul(blocks, matrix, precision=lax.Precision.HIGHEST)
    return moved.reshape(*x.shape[:-1], blocks.shape[-2] * len(signs))


def _folded(draw: Draw | None, amax: jax.Array) -> jax.Array | None:
    if draw is None:
        return None
    key, number = draw  # `jax.random.fold_in` would be a loop of its own
    data = jax.random.key_data(key)
    first = np.arange(data.size, dtype=np.uint32) == 0
    data ^= jnp.where(first, lax.bitcast_convert_type(amax, jnp.uint32) * _ODD + number, np.uint32(0))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key)) if is_key(key) else data


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Returns an array with a dimension split into two, blocks and their numbers; zeros fill up the last block."""
    missing = -x.shape[axis] % size
    filled = lax.pad(x, jnp.zeros((), x.dtype), [(0, missing if i == axis else 0, 0) for i in range(x.ndim)])
    return filled.reshape(*x.shape[:axis], filled.shape[axis] // size, size, *x.shape[axis + 1 :])


def _joined(x: jax.Array, axis: int, length: int) -> jax.Array:
    """Returns an array with two neighboring dimensions joined into one, of which the last numbers are dropped."""
    rows = x.shape[axis] * x.shape[axis + 1]
    return lax.slice_in_dim(x.reshape(*x.shape[:axis], rows, *x.shape[axis + 2 :]), 0, length, axis=axis)
