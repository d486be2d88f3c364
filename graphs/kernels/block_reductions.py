"""Reductions of any function of the ids of both ends, block by block, differentiated by jax.

The function gets blocks of a few edges of one node each, of which one row is kept. The gradient computes a chunk's
edges again. Arrays that the function closes over, such as a network's parameters, get gradients that are added over the
chunks in float32; since each chunk adds to all of them, there are at most 64 chunks.
"""

import math
from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.kernels.chunks import CPU_ELEMENTS, at
from jmp_train.graphs.structure import CSR, largest_over, rows_like, upcast

_MOST_CHUNKS = 64
BlockReduction = Literal["max", "sum", "mean"]
# Makes messages [edges, width] of the ids of edges' senders and receivers, int32 [edges].
Messages = Callable[[jax.Array, jax.Array], jax.Array]


def reduce_blocks(neighbors: CSR, messages: Messages, reduction: BlockReduction) -> jax.Array:
    """Returns the reduction of messages, [nodes, width] in their dtype; 0 for nodes without edges.

    Args:
      neighbors: the edges, sorted by their receivers.
      messages: a function of one edge.
      reduction: the reduction.
    """
    like = jax.eval_shape(messages, *[jnp.zeros(1, jnp.int32)] * 2)
    if neighbors.num_blocks == 0:
        return jnp.zeros((neighbors.num_nodes, *like.shape[1:]), like.dtype)
    size = _blocks_per_chunk(neighbors, math.prod(like.shape[1:]))
    pure, closed_over = jax.closure_convert(messages, *[jnp.zeros(size * neighbors.width, jnp.int32)] * 2)
    wide = [upcast(x) for x in closed_over]

    @jax.checkpoint
    def of_chunk(wide: list[jax.Array], chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        starts, counts, nodes = chunk
        places = jnp.arange(neighbors.width, dtype=jnp.int32)
        positions = jnp.minimum(starts[:, None] + places, neighbors.others.shape[0] - 1)
        senders, receivers = at(neighbors.others, positions).ravel(), jnp.repeat(nodes, neighbors.width)
        narrow = [x.astype(own.dtype) for x, own in zip(wide, closed_over, strict=True)]
        rows = pure(senders, receivers, *narrow).reshape(*positions.shape, -1)
        is_edge = (places < counts[:, None])[..., None]
        if reduction == "max":  # exact in half
            return largest_over(jnp.where(is_edge, rows, jnp.asarray(-jnp.inf, rows.dtype)), 1)
        rows = upcast(rows)
        return jnp.where(is_edge, rows, jnp.zeros_like(rows)).sum(1)

    chunks = tuple(_in_chunks(x, size) for x in (neighbors.starts, neighbors.counts, neighbors.nodes))
    rows = jax.lax.map(lambda chunk: of_chunk(wide, chunk), chunks)
    rows = rows.reshape(-1, *rows.shape[2:])[: neighbors.num_blocks]
    if reduction == "max":
        found = jraph.segment_max(rows, neighbors.nodes, neighbors.num_nodes, indices_are_sorted=True)
        return jnp.where(rows_like(neighbors.degrees > 0, found), found, jnp.zeros_like(found))
    total = jraph.segment_sum(rows, neighbors.nodes, neighbors.num_nodes, indices_are_sorted=True)
    if reduction == "mean":
        total = total / rows_like(jnp.maximum(neighbors.degrees, 1).astype(total.dtype), total)
    return total.astype(like.dtype)


def _blocks_per_chunk(neighbors: CSR, elements: int) -> int:
    """Returns the number of blocks per chunk for messages of a number of elements."""
    in_cache = CPU_ELEMENTS // max(1, elements * neighbors.width)
    return max(in_cache, -(-neighbors.num_blocks // _MOST_CHUNKS))


def _in_chunks(array: jax.Array, size: int) -> jax.Array:
    """Returns an array [blocks] as [chunks, size], with zeros behind."""
    return jnp.pad(array, (0, -len(array) % size)).reshape(-1, size)
