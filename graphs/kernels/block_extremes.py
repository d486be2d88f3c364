"""The largest of what blocks of edges have, by node, with a gradient that is made a chunk of blocks at a time."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import pvary_alike
from jmp_train.graphs.kernels.edge_reads import NONE
from jmp_train.graphs.structure import equal_or_nan, upcast


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def largest_of_blocks(count: int, nodes: jax.Array, values: jax.Array, ties: jax.Array) -> jax.Array:
    """Returns the largest [nodes, ...] of values [chunks, blocks, ...], -inf without blocks.

    Blocks share the gradient by how many of their edges have that value. A chunk at a time, or XLA would make several
    arrays as long as the blocks.

    Args:
      count: how many nodes there are.
      nodes: int32 [chunks, blocks]; beyond the last one for blocks that count nowhere.
      values: of each block.
      ties: how many edges have it.
    """
    del ties
    return _largest_by_node(count, nodes, values)


def _by_node(
    update: Callable[[Any, jax.Array], jax.Array], start: jax.Array, nodes: jax.Array, values: jax.Array
) -> jax.Array:
    """Returns the reduction [nodes, ...] of values [chunks, blocks, ...], a chunk at a time.

    Args:
      update: makes the new rows of `at[rows]` of the old ones, and of values.
      start: what it starts from.
      nodes: see `largest_of_blocks`.
      values: see `largest_of_blocks`.
    """

    def add(rows: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        nodes, values = chunk
        return update(rows.at[nodes], values.astype(rows.dtype)), None

    return jax.lax.scan(add, pvary_alike((start, nodes, values))[0], (nodes, values))[0]


def _largest_by_node(count: int, nodes: jax.Array, values: jax.Array) -> jax.Array:
    start = jnp.full((count, *values.shape[2:]), -jnp.inf, values.dtype)
    return _by_node(lambda rows, new: rows.max(new, mode="drop", indices_are_sorted=True), start, nodes, values)


def _is_extreme(nodes: jax.Array, values: jax.Array, extreme: jax.Array) -> jax.Array:
    """Returns which values [blocks, ...], or NaN, are those of their node."""
    return equal_or_nan(values, extreme.at[nodes].get(mode="clip"))


def _largest_forward(
    count: int, nodes: jax.Array, values: jax.Array, ties: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    most = _largest_by_node(count, nodes, values)

    def kept(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        nodes, values, ties = chunk
        return jnp.where(_is_extreme(nodes, values, most), ties, jnp.zeros_like(ties))

    return most, (nodes, jax.lax.map(kept, (nodes, values, ties)))


def _largest_backward(
    count: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[None, jax.Array, None]:
    nodes, ties = saved
    start = jnp.zeros((count, *gradient.shape[1:]), upcast(gradient).dtype)
    total = _by_node(lambda rows, new: rows.add(new, mode="drop", indices_are_sorted=True), start, nodes, ties)
    share, dtype = upcast(gradient) / jnp.maximum(total, 1), gradient.dtype

    def write(index: jax.Array, rows: jax.Array) -> jax.Array:
        weights = ties[index].astype(share.dtype)
        part = (share.at[nodes[index]].get(mode="clip") * weights).astype(dtype)
        return jax.lax.dynamic_update_index_in_dim(rows, part, index, 0)

    # These begin their life after what was saved: XLA would keep the same zeros for the values' scan and for this.
    zero = jax.lax.optimization_barrier((jnp.zeros((), dtype), ties))[0]
    rows = pvary_alike((jnp.broadcast_to(zero, ties.shape), saved, share))[0]
    return None, jax.lax.fori_loop(0, len(nodes), write, rows), None


largest_of_blocks.defvjp(_largest_forward, _largest_backward)


def first_of_blocks(count: int, nodes: jax.Array, values: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the first edges, int32 [nodes, ...], that have the largest of their node; -1 without edges."""
    most = _largest_by_node(count, nodes, values)
    first = jnp.where(_is_extreme(nodes, values, most), first, NONE)
    start = jnp.full((count, *first.shape[2:]), NONE, jnp.int32)
    first = _by_node(lambda rows, new: rows.min(new, mode="drop", indices_are_sorted=True), start, nodes, first)
    return jnp.where(first == NONE, -1, first)
