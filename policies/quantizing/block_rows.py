"""Blocks of arrays of many shapes as rows of one array, encoded by one program.

A compiler's work grows with the number of loops over arrays, and encoding takes about ten. In rows, an array needs only
the loops that copy it.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import get_abstract_mesh

from jmp_train.policies.quantizing.blocks import (
    BlockQuantized,
    as_before,
    code_of,
    from_bits,
    in_blocks,
    layout_of,
    numbers_of_bits,
    quantize_values,
    split,
)
from jmp_train.policies.quantizing.rounding import row_keys

_LARGEST = 2**18  # elements of an array that is copied into rows
_TOTAL = 2**23  # elements of the rows of one program
_UNIT = 16  # elements of which a row is a multiple, so that it can be split


class _Place(NamedTuple):
    """The place of an array's blocks: rows `start` to `end`, of which they fill the first `size` elements."""

    start: int
    end: int
    size: int


class _Columns(NamedTuple):
    """Facts about each row, [rows, 1] each.

    Attributes:
      array: the number of its array.
      signed: whether its codes are int8.
      length: the number of its elements that are in the array.
      drawn: the number of elements in the rows of its array before it.
      stored: the position of its first code among those of all arrays.
    """

    array: np.ndarray
    signed: np.ndarray
    length: np.ndarray
    drawn: np.ndarray
    stored: np.ndarray


def row_groups(quantized: Mapping[int, BlockQuantized], block_size: int) -> list[list[int]]:
    """Returns the keys of the arrays that are encoded together, a list for each program.

    Large arrays are in none, nor are those that devices may share: rows of several arrays cannot be sharded like them.

    Args:
      quantized: arrays in blocks.
      block_size: largest number of elements per block.
    """
    if not _is_on_one_device():
        return []
    groups: dict[Any, list[int]] = {}
    totals: dict[Any, int] = {}
    for number, x in quantized.items():
        if x.codes.size > _LARGEST:
            continue
        kind = (code_of(x.codes.dtype.name), 2 * _size(x) <= block_size)
        totals[kind] = totals.get(kind, 0) + x.scales.size * block_size
        groups.setdefault((kind, totals[kind] // _TOTAL), []).append(number)
    return [group for group in groups.values() if len({quantized[number].codes.shape for number in group}) > 1]


def dequantize_rows(quantized: Sequence[BlockQuantized]) -> list[jax.Array]:
    """Returns the result of `dequantize` for each array of a group.

    Args:
      quantized: arrays of one of the groups of `row_groups`.
    """
    places, columns = _placed(quantized)
    numbers = _numbers(_code(quantized), columns.signed, *_stored(quantized, columns))
    return [
        as_before(_cut(numbers, at), x.codes.shape, layout_of(x)[0]) for x, at in zip(quantized, places, strict=True)
    ]


def requantize_rows(
    arrays: Sequence[jax.Array], old: Sequence[BlockQuantized], keys: jax.Array | None
) -> list[BlockQuantized]:
    """Returns the result of `requantize` for each array of a group.

    Args:
      arrays: float32 arrays.
      old: arrays of the same shapes, of one of the groups of `row_groups`.
      keys: a random key for each array; None rounds to the nearest.
    """
    places, columns = _placed(old)
    stored = _stored(old, columns)
    values = jnp.zeros(stored[0].shape, jnp.float32)
    for x, y, at in zip(arrays, old, places, strict=True):
        values = lax.dynamic_update_slice(values, in_blocks(x, *layout_of(y)).reshape(-1, at.size), (at.start, 0))
    rows = (values, *stored, columns, None if keys is None else row_keys(keys, columns.array, columns.drawn))
    # Two halves, one after the other: a compiler would fuse the whole with each copy of an array, and compile it anew.
    halves = jax.tree_util.tree_map(lambda x: x.reshape(2, len(x) // 2, *x.shape[1:]), rows)
    bits, scales = lax.map(functools.partial(_requantized, _code(old)), halves)
    bits, scales = bits.reshape(values.shape), scales.reshape(-1)
    return [
        from_bits(
            BlockQuantized(
                as_before(_cut(bits, at), x.codes.shape, layout_of(x)[0]),
                lax.slice(scales, (at.start,), (at.end,)).reshape(x.scales.shape),
            ),
            x.codes.dtype.name,
        )
        for x, at in zip(old, places, strict=True)
    ]


def _requantized(code: str, rows: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
    values, old_bits, old_scales, columns, keys = rows
    old = _numbers(code, columns.signed, old_bits, old_scales)
    before, after = (lax.bitcast_convert_type(x, jnp.uint32) for x in (old, values))
    inside = lax.broadcasted_iota(jnp.int32, values.shape, 1) < columns.length
    changed = split((before != after) & inside).any((-2, -1))
    bits, scales = quantize_values(values, code, columns.signed, keys)
    return jnp.where(changed[:, None], bits, old_bits), jnp.where(changed, scales, old_scales)


def _numbers(code: str, signed: Any, bits: jax.Array, scales: jax.Array) -> jax.Array:
    return numbers_of_bits(bits, code, signed) * scales[:, None]


def _is_on_one_device() -> bool:
    """Returns whether no array of the program that is traced can be shared by devices."""
    mesh = get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() == 1
    return math.prod(mesh.shape[axis] for axis in mesh.axis_names if axis not in mesh.manual_axes) == 1


def _code(quantized: Sequence[BlockQuantized]) -> str:
    return code_of(quantized[0].codes.dtype.name)


def _size(x: BlockQuantized) -> int:
    return -(-_length(x) // x.scales.shape[-1])


def _length(x: BlockQuantized) -> int:
    """Returns the number of elements in the axes in which the blocks lie."""
    return math.prod(x.codes.shape[x.codes.ndim - layout_of(x)[0] :])


def _by_dtype(quantized: Sequence[BlockQuantized]) -> list[list[int]]:
    """Returns the numbers of the arrays of each dtype."""
    names = [x.codes.dtype.name for x in quantized]
    return [[number for number, each in enumerate(names) if each == name] for name in dict.fromkeys(names)]


def _placed(quantized: Sequence[BlockQuantized]) -> tuple[list[_Place], _Columns]:
    """Returns the places of arrays, and the columns of all rows, whose number is made even."""
    ends = np.cumsum([x.scales.size for x in quantized]).tolist()
    places = [_Place(end - x.scales.size, end, _size(x)) for x, end in zip(quantized, ends, strict=True)]
    array = np.repeat(np.arange(len(places), dtype=np.uint32), [x.scales.size for x in quantized])
    array = np.pad(array, (0, len(array) % 2), mode="edge")[:, None]
    order = [number for numbers in _by_dtype(quantized) for number in numbers]
    starts = np.zeros(len(places), np.int32)
    starts[order] = np.cumsum([0, *(quantized[number].codes.size for number in order[:-1])])
    columns = np.array(
        [(at.start, at.size, _length(x), x.scales.shape[-1]) for x, at in zip(quantized, places, strict=True)]
    )
    start, size, length, blocks = columns.astype(np.int32).T[:, array]
    row = np.arange(len(array), dtype=np.int32)[:, None] - start
    before = row % blocks * size
    signed = np.array([x.codes.dtype == np.int8 for x in quantized])[array]
    stored = starts[array] + row // blocks * length + before
    return places, _Columns(array, signed, np.minimum(size, length - before), (row * size).astype(np.uint32), stored)


def _cut(rows: jax.Array, at: _Place) -> jax.Array:
    return lax.slice(rows, (at.start, 0), (at.end, at.size))


def _stored(quantized: Sequence[BlockQuantized], columns: _Columns) -> tuple[jax.Array, jax.Array]:
    """Returns the codes of all arrays as rows of bits, each filled with its last one, and the scales of the rows."""
    joined = [
        lax.bitcast_convert_type(lax.concatenate([quantized[n].codes.reshape(-1) for n in numbers], 0), jnp.uint8)
        for numbers in _by_dtype(quantized)
    ]
    width = -(-max(map(_size, quantized)) // _UNIT) * _UNIT
    within = jnp.minimum(lax.broadcasted_iota(jnp.int32, (len(columns.stored), width), 1), columns.length - 1)
    bits = lax.concatenate(joined, 0).at[columns.stored + within].get(mode="clip")
    scales = [x.scales.reshape(-1) for x in quantized]
    return bits, jnp.pad(lax.concatenate(scales, 0), (0, len(bits) - sum(map(len, scales))))
