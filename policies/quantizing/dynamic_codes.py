"""The dynamic code: 256 numbers in [-1, 1] or [0, 1] with small relative distances over seven decades.

Reference: Dettmers et al., "8-bit Optimizers via Block-wise Quantization", https://arxiv.org/abs/2110.02861, and
`bitsandbytes.functional.create_dynamic_map`, which has the same tables.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
