"""Dropout of edges, recomputed from a key wherever an edge is met, and other factors of edges' weights."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32

from jmp_train.graphs.kernels.chunks import Chunk, at
from jmp_train.graphs.structure import CSR


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeDropout:
    """The dropped edges of each head.

    Attributes:
      words: uint32 [heads, 2], a key of Threefry for each head.
      rate: the fraction of dropped edges.
    """

    words: jax.Array
    rate: float = dataclasses.field(metadata={"static": True})

    def of_edges(self, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge and head [..., heads].

        Args:
          first: int [...], the values that identify an edge.
          second: the same, if two values identify an edge.
        """
        second = jnp.zeros_like(first) if second is None else second
        counts = jnp.stack([first, second]).astype(jnp.uint32)
        draw = jax.vmap(lambda words: threefry_2x32((words[0], words[1]), counts)[0], out_axes=-1)
        is_kept = draw(self.words) >= jnp.uint32(int(self.rate * 2**32))
        return jnp.where(is_kept, jnp.float32(1 / (1 - self.rate)), jnp.float32(0))

    def of_chunk(self, neighbors: CSR, chunk: Chunk, *, nodes_are_receivers: bool) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge [blocks, width, heads].

        Places identify edges or, without places, their two ends: then edges between the same two nodes are dropped
        together.

        Args:
          neighbors: the edges.
          chunk: a chunk of them.
          nodes_are_receivers: True if the edges enter the nodes by which they are sorted.
        """
        if neighbors.edges is not None:
            return self.of_edges(at(neighbors.edges, chunk.positions))
        nodes = jnp.broadcast_to(chunk.nodes[:, None], chunk.others.shape)
        ends = (chunk.others, nodes) if nodes_are_receivers else (nodes, chunk.others)
        return self.of_edges(*ends)


def edge_dropout(rate: float, key: jax.Array | None, heads: int) -> EdgeDropout | None:
    """Returns the dropout of edges; None if it is off.

    Args:
      rate: the fraction of dropped edges.
      key: a random key of any of jax's generators.
      heads: number of heads.
    """
    if not rate or key is None:
        return None
    return EdgeDropout(jax.random.bits(key, (heads, 2), jnp.uint32), rate)
