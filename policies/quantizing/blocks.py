"""Arrays as 8-bit codes in blocks, with one scale per block.

The codes have the array's shape, so that they are sharded like it. Blocks lie within the last axis; if that is
shorter than a block, they lie within as many of the last axes as are long enough together.

The dynamic code has 256 numbers in [-1, 1] or [0, 1] with small relative distances over seven decades.

Reference: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, and
`bitsandbytes.functional.create_dynamic_map`, which has the same tables.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.quantizing.rounding import RowKeys, clip_to, from_float8_bits, to_float8_bits, uniform

_DECADES = 7
_LEAST = 104 << 7  # the upper 16 bits of 2**-23, which is below half of the smallest number
_BUCKETS = (127 << 7) - _LEAST + 1  # the last one begins at 1


@functools.lru_cache
def dynamic_code(signed: bool) -> np.ndarray:
    """Returns the numbers that the codes 0 to 255 represent, float32[256], in ascending order.

    Each decade from 1e-7 to 1 has twice as many numbers as the one below, the middles of equal parts of it. Zero and 1
    complete them. The signed code has no -1; its lowest number is -0.993.

    Args:
      signed: whether half of the codes represent negative numbers.

    Example:
      >>> dynamic_code(signed=False)[[0, 1, 254, 255]].tolist()  # doctest: +ELLIPSIS
      [0.0, 3.25...e-07, 0.996..., 1.0]
    """
    numbers = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = np.linspace(0.1, 1, 2 ** (decade if signed else decade + 1) + 1)
        middles = (edges[:-1] + edges[1:]) / 2 * 10.0 ** (decade - _DECADES + 1)
        numbers += [*middles, *(-middles if signed else [])]
    return np.sort(np.array(numbers)).astype(np.float32)


def numbers_of(index: jax.Array, signed: bool | jax.Array) -> jax.Array:
    """Returns the float32 numbers that indices into a dynamic code represent.

    Args:
      index: int32 array, from 0 to 255.
      signed: see `dynamic_code`; may be a bool scalar array.
    """
    return _take(np.concatenate([dynamic_code(False), dynamic_code(True)]), index + _offset(signed, 256))


def count_below(x: jax.Array, signed: bool | jax.Array, *, middles: bool) -> jax.Array:
    """Returns the number of 255 ascending numbers below each element, int32 in the shape of `x`.

    The upper 16 bits of a float32 determine its bucket. A bucket contains at most one of the numbers, so the count is
    one of two.

    Args:
      x: float32 array. For NaN, the count is arbitrary.
      signed: see `dynamic_code`; may be a bool scalar array.
      middles: True for the numbers of `upper_ends`, False for the dynamic code without its first number.
    """
    tables = [_buckets(signed, middles) for signed in (False, True)]
    counts, ends = (np.concatenate(each) for each in zip(*tables, strict=True))
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = (bits & 0x7FFFFFFF) >> 16
    bucket = jnp.clip(magnitude - _LEAST, 0, _BUCKETS - 1) + jnp.where(bits < 0, _BUCKETS, 0)
    bucket += _offset(signed, 2 * _BUCKETS)
    return _take(counts, bucket) + (x > _take(ends, bucket)).astype(jnp.int32)


def _offset(signed: bool | jax.Array, size: int) -> jax.Array:
    return jnp.where(signed, jnp.int32(size), jnp.int32(0))


def _take(table: np.ndarray, index: jax.Array) -> jax.Array:
    return jnp.asarray(table).at[index].get(mode="promise_in_bounds")


class _Buckets(NamedTuple):
    """The buckets, positive numbers first: the count of numbers below each, and the number within, or infinity."""

    counts: np.ndarray
    ends: np.ndarray


@functools.lru_cache
def _buckets(signed: bool, middles: bool) -> _Buckets:
    numbers = upper_ends(signed) if middles else dynamic_code(signed)[1:]
    starts = (np.arange(_LEAST, _LEAST + _BUCKETS + 1, dtype=np.int32) << 16).view(np.float32)
    starts[0], starts[-1] = 0, np.inf
    low, high = starts[:-1], starts[1:]
    # Positive buckets are [low, high), negative ones (-high, -low].
    counts = [np.searchsorted(numbers, low, side="left"), np.searchsorted(numbers, -high, side="right")]
    after = [np.searchsorted(numbers, high, side="left"), np.searchsorted(numbers, -low, side="right")]
    count, within = np.concatenate(counts), np.concatenate(after) - np.concatenate(counts)
    if within.max() > 1:
        raise ValueError("two numbers share the upper 16 bits of a float32")
    inside = np.where(within == 1, numbers[np.minimum(count, len(numbers) - 1)], np.float32(np.inf))
    return _Buckets(count.astype(np.int32), inside.astype(np.float32))


@functools.lru_cache
def upper_ends(signed: bool) -> np.ndarray:
    """Returns the largest float32 nearest to each code but the last, float32[255]; ties go to the lower code.

    Args:
      signed: see `dynamic_code`.
    """
    numbers = dynamic_code(signed).astype(np.float64)
    middles = (numbers[:-1] + numbers[1:]) / 2
    ends = middles.astype(np.float32)
    return np.where(ends > middles, np.nextafter(ends, np.float32(-np.inf)), ends)


BLOCK_DTYPES = ("int8", "uint8", "float8_e4m3fn", "float8_e5m2")
_SHARED_BY = 8  # number of devices that can share the axis of the blocks


class BlockQuantized(NamedTuple):
    """An array with 8 bits per element and 32 bits per block.

    Attributes:
      codes: an array with the shape of the quantized one. int8 holds the signed dynamic code minus 128, uint8 the
        unsigned one, and float8 holds numbers.
      scales: float32, the value of a code of 1 in each block: the array's first axes and one of blocks.

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

    A block's scale is the smallest by which the whole block fits: its largest magnitude for the dynamic codes, and
    1/448 or 1/57344 of that for float8. The signed code ends at -0.993, so if the largest magnitude is that of a
    negative number, the scale is larger accordingly. Each element divided by the scale, in float32, is rounded to a
    number of the code.

    Args:
      x: floating array of at least one element, converted to float32. A block with an inf or NaN becomes NaN, and
        so does a block with a negative number in "uint8".
      dtype: "int8", the signed dynamic code; "uint8", the unsigned one; "float8_e4m3fn" or "float8_e5m2".
      key: a jax random key for stochastic rounding; None rounds to the nearest, with ties of the dynamic codes down.
      block_size: largest number of elements per block. If possible, the axis is divided into a multiple of 8 blocks,
        less than four times the necessary number. Up to 8 devices can then share it without cutting a block.

    Example:
      >>> import jax.numpy as jnp
      >>> x = quantize(jnp.array([[1.0, -0.25, 0.0]]), "int8")
      >>> [round(number, 4) for number in dequantize(x)[0].tolist()]
      [1.0, -0.2477, 0.0]

    Reference: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861.
    """
    name = jnp.dtype(dtype).name
    return from_bits(quantize_bits(x.astype(jnp.float32), code_of(name), name == "int8", key, block_size), name)


@jax.jit  # traced once for all arrays of a shape
def dequantize(x: BlockQuantized) -> jax.Array:
    """Returns the float32 array that codes and scales represent.

    Args:
      x: from `quantize`.
    """
    return _dequantized(to_bits(x), code_of(x.codes.dtype.name), x.codes.dtype == jnp.int8)


def requantize(x: jax.Array, old: BlockQuantized, key: jax.Array | None = None) -> BlockQuantized:
    """Returns an array quantized like an earlier one; unchanged blocks keep their codes and scales.

    Args:
      x: float32 array, such as an update of `dequantize(old)`.
      old: an array of the same shape.
      key: see `quantize`.
    """
    name = old.codes.dtype.name
    return from_bits(requantize_bits(x, to_bits(old), code_of(name), name == "int8", key), name)


def code_of(name: str) -> str:
    """Returns the code of a dtype of `BLOCK_DTYPES`: "dynamic" for int8 and uint8, float8 by its own name."""
    return "dynamic" if name in ("int8", "uint8") else name


def to_bits(x: BlockQuantized) -> BlockQuantized:
    """Returns a quantized array whose codes are the same bits as uint8."""
    return x._replace(codes=lax.bitcast_convert_type(x.codes, jnp.uint8))


def from_bits(x: BlockQuantized, name: str) -> BlockQuantized:
    """Returns the inverse of `to_bits`: an array with codes of a dtype of `BLOCK_DTYPES`."""
    return x._replace(codes=lax.bitcast_convert_type(x.codes, jnp.dtype(name)))


def quantize_bits(
    x: jax.Array, code: str, signed: bool | jax.Array, key: jax.Array | None, block_size: int
) -> BlockQuantized:
    """Returns the result of `quantize` as bits, with one program for both dynamic codes.

    Args:
      x: float32 array.
      code: see `code_of`.
      signed: True if the codes are int8; may be a bool scalar array.
      key: see `quantize`.
      block_size: see `quantize`.
    """
    return _quantized(x, code, signed, key, *_layout(x.shape, block_size))


def requantize_bits(
    x: jax.Array, old: BlockQuantized, code: str, signed: bool | jax.Array, key: jax.Array | None = None
) -> BlockQuantized:
    """Returns the result of `requantize`, from and as bits.

    Args:
      x: float32 array.
      old: a quantized array of the same shape, from `to_bits`.
      code: see `code_of`.
      signed: see `quantize_bits`.
      key: see `quantize`.
    """
    axes, blocks = layout_of(old)
    before, after = (lax.bitcast_convert_type(y, jnp.uint32) for y in (_dequantized(old, code, signed), x))
    changed = split(in_blocks(before != after, axes, blocks)).any((-2, -1))
    new = _quantized(x, code, signed, key, axes, blocks)
    codes = jnp.where(changed[..., None], *(in_blocks(y.codes, axes, blocks) for y in (new, old)))
    return BlockQuantized(as_before(codes, x.shape, axes), jnp.where(changed, new.scales, old.scales))


def _layout(shape: tuple[int, ...], block_size: int) -> tuple[int, int]:
    """Returns the number of last axes in which blocks lie, and their number of blocks."""
    axes = next((n for n in range(1, len(shape)) if math.prod(shape[-n:]) >= block_size), max(len(shape), 1))
    length = math.prod(shape[-axes:])
    least = -(-length // block_size)
    multiple = _SHARED_BY if length % _SHARED_BY == 0 else 1
    # A number of blocks that divides the axis needs no padding.
    return axes, next((n for n in range(least, 4 * least + multiple) if n % multiple == length % n == 0), least)


def layout_of(x: BlockQuantized) -> tuple[int, int]:
    """Returns the number of last axes in which an array's blocks lie, and their number of blocks."""
    return x.codes.ndim - x.scales.ndim + 1, x.scales.shape[-1]


def _dequantized(x: BlockQuantized, code: str, signed: bool | jax.Array) -> jax.Array:
    axes, blocks = layout_of(x)
    numbers = numbers_of_bits(in_blocks(x.codes, axes, blocks), code, signed)
    return as_before(numbers * x.scales[..., None], x.codes.shape, axes)


def numbers_of_bits(bits: jax.Array, code: str, signed: bool | jax.Array) -> jax.Array:
    """Returns the float32 numbers that codes represent in blocks with a scale of 1.

    Args:
      bits: codes as uint8.
      code: see `code_of`.
      signed: see `quantize_bits`; may be a bool array that broadcasts with the codes.
    """
    if code == "dynamic":
        return numbers_of((bits ^ _sign_bit(signed)).astype(jnp.int32), signed)
    return from_float8_bits(bits, code)


def _quantized(
    x: jax.Array, code: str, signed: bool | jax.Array, key: jax.Array | None, axes: int, blocks: int
) -> BlockQuantized:
    """Returns an array in blocks, with codes as uint8 bits."""
    bits, scales = quantize_values(in_blocks(x, axes, blocks), code, signed, key)
    return BlockQuantized(as_before(bits, x.shape, axes), scales)


def quantize_values(
    values: jax.Array, code: str, signed: bool | jax.Array, key: jax.Array | RowKeys | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of blocks as uint8 bits, and their scales.

    Args:
      values: float32 array, whose last axis is a block.
      code: see `code_of`.
      signed: see `numbers_of_bits`.
      key: a jax random key, or the keys of rows; None rounds to the nearest.
    """
    scales = _scales(values, code, signed)
    # A compiler may multiply by the inverse, which float32 flushes to zero for the largest scales.
    shift = jnp.where(scales > 2.0**64, 2.0**-64, 1.0).astype(jnp.float32)
    divisors = jnp.where(scales == 0, 1, scales * shift)
    return _bits_of(values * shift[..., None] / divisors[..., None], code, signed, key), scales


def _sign_bit(signed: bool | jax.Array) -> jax.Array:
    """Returns the bit to flip between indices of a dynamic code and codes: int8 stores index 128 as 0."""
    return jnp.where(signed, np.uint8(128), np.uint8(0))


def split(x: jax.Array) -> jax.Array:
    """Returns an array with its last axis split into two that are as short as possible.

    XLA's CPU compiler splits reductions of more than 32 elements into parts, each a program with its result in memory.
    """
    size = x.shape[-1]
    width = next((n for n in range(math.isqrt(size), 0, -1) if size % n == 0), 1)
    return x.reshape(*x.shape[:-1], size // width, width)


def in_blocks(x: jax.Array, axes: int, blocks: int) -> jax.Array:
    """Returns an array with its last axes as blocks, [..., blocks, elements of a block], padded with zeros."""
    first, length = x.shape[: x.ndim - axes], math.prod(x.shape[x.ndim - axes :])
    size = -(-length // blocks)
    x = x.reshape(*first, length)
    if size * blocks != length:
        x = jnp.pad(x, [*[(0, 0)] * len(first), (0, size * blocks - length)])
    return x.reshape(*first, blocks, size)


def as_before(x: jax.Array, shape: tuple[int, ...], axes: int) -> jax.Array:
    """Returns the array of a shape from its blocks, the inverse of `in_blocks`."""
    first = shape[: len(shape) - axes]
    return x.reshape(*first, -1)[..., : math.prod(shape[len(shape) - axes :])].reshape(shape)


def _scales(values: jax.Array, code: str, signed: bool | jax.Array) -> jax.Array:
    limits = np.finfo(np.float32)
    needed = values
    if code == "dynamic":
        of_negative = jnp.minimum(values / dynamic_code(signed=True)[0], limits.max)
        needed = jnp.where(values < 0, jnp.where(signed, of_negative, jnp.nan), values)
        needed = jnp.where(values == -jnp.inf, jnp.inf, needed)
    # As integers, NaN is larger than infinity. A maximum of float32 does not guarantee this: XLA may lose a NaN. The
    # shifts drop the sign, and keep XLA's CPU compiler from making one long reduction of two short ones.
    bits = split(lax.bitcast_convert_type(needed, jnp.uint32)) << jnp.uint32(1)
    largest = lax.bitcast_convert_type((bits.max(-1) >> jnp.uint32(1)).max(-1), jnp.float32)
    scales = largest
    if code != "dynamic":
        # XLA flushes subnormal float32 numbers to zero. The smallest normal number is a fine scale for all others.
        least = jnp.where(largest > 0, limits.tiny, 0)
        scales = jnp.maximum(largest / np.float32(jnp.finfo(code).max), least)
    return jnp.where(jnp.isfinite(largest), scales, jnp.nan)


def _bits_of(x: jax.Array, code: str, signed: bool | jax.Array, key: jax.Array | RowKeys | None) -> jax.Array:
    if code != "dynamic":
        return to_float8_bits(clip_to(x, code), code, key)
    if key is None:
        index = count_below(x, signed, middles=True)
    else:
        x = jnp.minimum(x, 1)  # a compiler may multiply by the scale's inverse, and so pass the last number
        index = count_below(x, signed, middles=False)  # the index of the number below x
        low, high = numbers_of(index, signed), numbers_of(index + 1, signed)
        index += (uniform(key, x.shape) < (x - low) / (high - low)).astype(jnp.int32)
    return index.astype(jnp.uint8) ^ _sign_bit(signed)
