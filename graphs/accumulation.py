"""Sums over many rows, and reads of one row many times, whose gradients are such sums.

Rows of a segment are added in blocks of 1,024, and then the blocks, so that rounding errors do not
grow with a segment's length: in float32 a running sum of 100,000 equal numbers errs by 1e-4 of it.
A read goes the same way backwards, first to the blocks and then to the rows, so that the
gradient, which jax derives, is added in blocks as well, in every order and under every transform.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import jraph

BLOCK = 1024


class Blocks(NamedTuple):
    """How rows are added up: each into a block, and each block into a segment.

    Attributes:
      of_rows: int [rows], the block of each row; one too many for rows that count nowhere.
      segments: int [blocks], the segment of each block.
    """

    of_rows: jax.Array
    segments: jax.Array


def blocks_of(segment_ids: jax.Array, num_segments: int, *, is_sorted: bool = False) -> Blocks:
    """Returns blocks of at most 1,024 rows.

    Args:
      segment_ids: int [rows], the segment of each row.
      num_segments: how many segments there are.
      is_sorted: whether the ids ascend.
    """
    rows = segment_ids.shape[0]
    count = rows // BLOCK + num_segments
    order = jnp.arange(rows) if is_sorted else jnp.argsort(segment_ids, stable=True)
    ascending = segment_ids[order]
    segments = jnp.arange(num_segments + 1, dtype=segment_ids.dtype)
    starts = jnp.searchsorted(ascending, segments)
    blocks_each = -((starts[:-1] - starts[1:]) // BLOCK)
    first_blocks = jnp.cumsum(blocks_each) - blocks_each

    is_valid = (ascending >= 0) & (ascending < num_segments)
    segment = jnp.where(is_valid, ascending, 0)
    block = first_blocks[segment] + (jnp.arange(rows) - starts[segment]) // BLOCK
    block = jnp.where(is_valid, block, count).astype(jnp.int32)
    of_rows = block if is_sorted else jnp.zeros_like(block).at[order].set(block)
    owners = jnp.searchsorted(first_blocks, jnp.arange(count), side="right") - 1
    return Blocks(of_rows, owners)


def sum_rows(
    data: jax.Array, segment_ids: jax.Array, num_segments: int, *, is_sorted: bool = False
) -> jax.Array:
    """Returns the sums [num_segments, ...] of the rows of each segment, in the data's dtype.

    Args:
      data: [rows, ...], wide: what is half has been cast before.
      segment_ids: int [rows]; rows of ids out of range count nowhere.
      num_segments: how many segments there are.
      is_sorted: whether the ids ascend.
    """
    if data.shape[0] <= BLOCK:
        ids = jnp.where(segment_ids < 0, num_segments, segment_ids)
        return jraph.segment_sum(data, ids, num_segments)
    if num_segments == 0:
        return jnp.zeros((0, *data.shape[1:]), data.dtype)
    blocks = blocks_of(segment_ids, num_segments, is_sorted=is_sorted)
    partial = jraph.segment_sum(data, blocks.of_rows, blocks.segments.shape[0])
    return jraph.segment_sum(partial, blocks.segments, num_segments, indices_are_sorted=True)


def read_rows(data: jax.Array, indices: jax.Array, *, is_sorted: bool = False) -> jax.Array:
    """Returns `data[indices]`, and zeros where an index is out of range.

    Args:
      data: [rows, ...], wide.
      indices: int [reads].
      is_sorted: whether the indices ascend.
    """
    rows = data.shape[0]
    if rows == 0:
        return jnp.zeros((indices.shape[0], *data.shape[1:]), data.dtype)
    if indices.shape[0] <= BLOCK:
        indices = jnp.where(indices < 0, rows, indices)
        return data.at[indices].get(mode="fill", fill_value=0)
    blocks = blocks_of(indices, rows, is_sorted=is_sorted)
    spread = data[blocks.segments]
    return spread.at[blocks.of_rows].get(mode="fill", fill_value=0)
