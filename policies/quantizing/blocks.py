"""Arrays as 8-bit codes in blocks, each with a scale of its own.

The codes have the array's shape, so that they are sharded as it is. Blocks lie within the last axis; where that is
shorter than a block, within as many of the last axes as are long enough together.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jmp_train.policies.quantizing.dynamic_codes import dynamic_code, upper_ends
from jmp_train.policies.quantizing.rounding import round_to

BLOCK_DTYPES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_SHARED_BY = 8  # devices that can share the axis of the blocks


class BlockQuantized(NamedTuple):
    """An array in 8 bits an element and 32 bits a block.

    Attributes:
      codes: an array of the shape of what is quantized. int8 holds the signed dynamic code, less 128, uint8 the
        unsigned one; of float8 they are numbers.
      scales: float32, what a code of 1 stands for in each block: the array's first axes and one of blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> x = quantize(jnp.linspace(-1, 1, 512).reshape(2, 256), "int8", block_size=128)
      >>> x.codes.shape, x.codes.dtype.name, x.scales.shape
      ((2, 256), 'int8', (2, 8))
    """

    codes: Any
    scales: Any


def quantize(x: jax.Array, dtype: DTypeLike, key: jax.Array | None = None, *, block_size: int = 256) -> BlockQuantized:
    """Returns an array in blocks of 8-bit codes.

    A block's scale is the least by which all of it fits: its largest magnitude for the dynamic codes, and 1/448 or
    1/57344 of that for float8. Where that magnitude is a negative number's, the signed code ends at -0.993, and the
    scale is larger accordingly. Each element divided by the scale, in float32, is rounded to one of the code's numbers.

    Args:
      x: floating array of at least one element; it is worked on in float32. A block with an inf or NaN becomes NaN, and
        so does one with a negative number in "uint8".
      dtype: "int8", the signed dynamic code; "uint8", the unsigned one; "float8_e4m3fn" or "float8_e5m2".
      key: a jax random key, to round stochastically; None rounds to the nearest, ties of the dynamic codes down.
      block_size: elements of a block at most. Where the axis has a divisor that is a multiple of 8, and not four times
        as many blocks as needed, it is divided into so many: up to 8 devices share it then without cutting a block.

    Example:
      >>> import jax.numpy as jnp
      >>> x = quantize(jnp.array([[1.0, -0.25, 0.0]]), "int8")
      >>> [round(number, 4) for number in dequantize(x)[0].tolist()]
      [1.0, -0.2477, 0.0]

    Reference: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861.
    """
    return _quantized(x.astype(jnp.float32), jnp.dtype(dtype), key, *_layout(x.shape, block_size))


def dequantize(x: BlockQuantized) -> jax.Array:
    """Returns the float32 array that codes and scales stand for.

    Args:
      x: what `quantize` returned.
    """
    axes, blocks = _layout_of(x)
    codes = _in_blocks(x.codes, axes, blocks)
    if x.codes.dtype == jnp.int8:
        numbers = jnp.asarray(dynamic_code(signed=True))[codes.astype(jnp.int32) + 128]
    elif x.codes.dtype == jnp.uint8:
        numbers = jnp.asarray(dynamic_code(signed=False))[codes.astype(jnp.int32)]
    else:
        numbers = codes.astype(jnp.float32)
    return _as_before(numbers * x.scales[..., None], x.codes.shape, axes)


def requantize(x: jax.Array, old: BlockQuantized, key: jax.Array | None = None) -> BlockQuantized:
    """Returns an array quantized as another one was; blocks that have not changed keep their codes and scales.

    Args:
      x: float32 array, such as what has become of `dequantize(old)`.
      old: of the same shape.
      key: see `quantize`.
    """
    axes, blocks = _layout_of(old)
    before, after = (jax.lax.bitcast_convert_type(y, jnp.uint32) for y in (dequantize(old), x))
    same = _in_blocks(before == after, axes, blocks).all(-1)
    new = _quantized(x, old.codes.dtype, key, axes, blocks)
    codes = jnp.where(same[..., None], *(_in_blocks(y.codes, axes, blocks) for y in (old, new)))
    return BlockQuantized(_as_before(codes, x.shape, axes), jnp.where(same, old.scales, new.scales))


def _layout(shape: tuple[int, ...], block_size: int) -> tuple[int, int]:
    """Returns how many of the last axes blocks lie in, and how many blocks these have."""
    axes = next((n for n in range(1, len(shape)) if math.prod(shape[-n:]) >= block_size), max(len(shape), 1))
    length = math.prod(shape[-axes:])
    least = -(-length // block_size)
    multiple = _SHARED_BY if length % _SHARED_BY == 0 else 1
    # A number of blocks that divides the axis wants no padding.
    return axes, next((n for n in range(least, 4 * least + multiple) if n % multiple == length % n == 0), least)


def _layout_of(x: BlockQuantized) -> tuple[int, int]:
    return x.codes.ndim - x.scales.ndim + 1, x.scales.shape[-1]


def _quantized(x: jax.Array, dtype: np.dtype, key: jax.Array | None, axes: int, blocks: int) -> BlockQuantized:
    values = _in_blocks(x, axes, blocks)
    scales = _scales(values, dtype)
    codes = _coded(values / jnp.where(scales == 0, 1, scales)[..., None], dtype, key)
    return BlockQuantized(_as_before(codes, x.shape, axes), scales)


def _in_blocks(x: jax.Array, axes: int, blocks: int) -> jax.Array:
    """Returns an array with the last axes as blocks, [..., blocks, elements of a block], padded with zeros."""
    first, length = x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :])
    size = -(-length // blocks)
    x = x.reshape(*first, length)
    if size * blocks != length:
        x = jnp.pad(x, [*[(0, 0)] * len(first), (0, size * blocks - length)])
    return x.reshape(*first, blocks, size)


def _as_before(x: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    first = shape[: len(shape) - axes]
    return x.reshape(*first, -1)[..., : math.prod(shape[len(shape) - axes :])].reshape(shape)


def _scales(values: jax.Array, dtype: np.dtype) -> jax.Array:
    largest, smallest = values.max(-1), values.min(-1)
    if dtype == jnp.int8:
        scales = jnp.maximum(largest, smallest / dynamic_code(signed=True)[0])
    elif dtype == jnp.uint8:
        scales = jnp.where(smallest < 0, jnp.nan, largest)
    else:
        scales = jnp.maximum(largest, -smallest) / np.float32(jnp.finfo(dtype).max)
    finite = jnp.isfinite(largest) & jnp.isfinite(smallest)
    return jnp.where(finite, jnp.minimum(scales, np.finfo(np.float32).max), jnp.nan)


def _coded(x: jax.Array, dtype: np.dtype, key: jax.Array | None) -> jax.Array:
    if dtype not in (jnp.int8, jnp.uint8):
        return round_to(x, dtype, key)
    signed = dtype == jnp.int8
    if key is None:
        index = _count_below(upper_ends(signed), x)
    else:
        numbers = dynamic_code(signed)
        x = jnp.minimum(x, 1)  # a compiler may multiply by the scale's inverse, and so pass the last number
        index = _count_below(numbers[1:], x)  # of the number below x
        low, high = jnp.asarray(numbers)[index], jnp.asarray(numbers)[index + 1]
        index += (jax.random.uniform(key, x.shape) < (x - low) / (high - low)).astype(jnp.int32)
    return (index - 128 if signed else index).astype(dtype)


def _count_below(ends: np.ndarray, x: jax.Array) -> jax.Array:
    """Returns how many of 255 ascending numbers are below each element, by halving: int32, in the shape of `x`."""
    table = jnp.asarray(ends)
    count = (x > ends[127]).astype(jnp.int32) * 128  # a gather of one number would be folded at the array's size
    for step in (64, 32, 16, 8, 4, 2, 1):
        count += step * (x > table[count + (step - 1)]).astype(jnp.int32)
    return count
