"""Factors of attention weights: edge weights, and dropout masks that are recomputed from a key.

Whether an edge is dropped is a hash of the key and the edge, and so nothing is stored for the gradient.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jmp_train.graphs.kernels.chunks import Chunk, at
from jmp_train.graphs.kernels.spmm_sddmm import edge_rows
from jmp_train.graphs.structure import CSR


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeDropout:
    """Which edges are dropped, those of each head apart.

    Attributes:
      words: uint32 [heads, 2], a key of Threefry for each head.
      rate: the share of the edges that are dropped.
    """

    words: jax.Array
    rate: float = dataclasses.field(metadata={"static": True})

    def of_edges(self, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge and head [..., heads].

        Args:
          first: int [...], by which edges are told apart.
          second: the same, if that needs two values.
        """
        second = jnp.zeros_like(first) if second is None else second
        counts = jnp.stack([first, second]).astype(jnp.uint32)
        draw = jax.vmap(lambda words: threefry_2x32((words[0], words[1]), counts)[0], out_axes=-1)
        is_kept = draw(self.words) >= jnp.uint32(int(self.rate * 2**32))
        return jnp.where(is_kept, jnp.float32(1 / (1 - self.rate)), jnp.float32(0))

    def of_chunk(self, neighbors: CSR, chunk: Chunk, *, nodes_are_receivers: bool) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge [blocks, width, heads].

        Edges are told apart by their places or, where they have none, by their two ends: then edges
        between the same two nodes are dropped together.

        Args:
          neighbors: the edges.
          chunk: a chunk of them.
          nodes_are_receivers: whether they enter the nodes that they are sorted by.
        """
        if neighbors.edges is not None:
            return self.of_edges(at(neighbors.edges, chunk.positions))
        nodes = jnp.broadcast_to(chunk.nodes[:, None], chunk.others.shape)
        ends = (chunk.others, nodes) if nodes_are_receivers else (nodes, chunk.others)
        return self.of_edges(*ends)


def edge_dropout(rate: float, key: jax.Array | None, heads: int) -> EdgeDropout | None:
    """Returns which edges are dropped; None where none are.

    Args:
      rate: the share of them.
      key: of any of jax's generators.
      heads: how many heads there are.
    """
    if not rate or key is None:
        return None
    return EdgeDropout(jax.random.bits(key, (heads, 2), jnp.uint32), rate)


def dropout_and_weight(
    neighbors: CSR,
    chunk: Chunk,
    dropout: EdgeDropout | None,
    edge_weight: jax.Array | None,
    *,
    nodes_are_receivers: bool,
) -> jax.Array | None:
    """Returns what a chunk's weights are multiplied by [blocks, width, heads or 1]; None for 1.

    Args:
      neighbors: the edges.
      chunk: a chunk of them.
      dropout: which are dropped.
      edge_weight: floating [edges].
      nodes_are_receivers: see `EdgeDropout.of_chunk`.
    """
    factor = None
    if dropout is not None:
        factor = dropout.of_chunk(neighbors, chunk, nodes_are_receivers=nodes_are_receivers)
    if edge_weight is None:
        return factor
    return times(edge_rows(neighbors, chunk, edge_weight)[..., None], factor)


def times(data: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Returns data times a factor in its dtype; None for 1."""
    return data if factor is None else data * factor.astype(data.dtype)
