"""Adjacencies in which only some of the edges count, under jit: all arrays keep their shapes."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure.adjacency import Adjacency
from jmp_train.graphs.structure.csr import CSR, CSRAndCSC

# Of the ids of edges, None if they have no places of their own, and of their senders and receivers.
IsKept = Callable[[jax.Array | None, jax.Array, jax.Array], jax.Array]


def where_edges(adjacency: Adjacency, is_kept: IsKept) -> Adjacency:
    """Returns the adjacency in which only the edges for which a function is True count.

    Others are like padding edges. There are no mailboxes, whose shapes depend on the degrees.

    Args:
      adjacency: the edges.
      is_kept: returns a mask, bool [edges], for int [edges]: the ids of edges, or None if they have no places of their
        own; the senders and the receivers. Ends out of range belong to edges that do not count anyway.
    """
    ends, mask = adjacency.ends, None
    if ends is not None:
        senders, receivers = ends
        mask = is_kept(jnp.arange(receivers.num_edges, dtype=jnp.int32), senders.ids, receivers.ids)
        ends = senders.where(mask), receivers.where(mask)
    neighbors = adjacency.neighbors
    if neighbors is not None:
        sorted_ = neighbors.by_source, neighbors.by_target
        of_source, of_target = (_mask_of(each, mask, is_kept, i == 0) for i, each in enumerate(sorted_))
        neighbors = CSRAndCSC(_where(sorted_[0], of_source), _where(sorted_[1], of_target))
    return Adjacency(ends, neighbors)


def _mask_of(edges: CSR, mask: jax.Array | None, is_kept: IsKept, nodes_are_senders: bool) -> jax.Array:
    """Returns whether each of the sorted edges is kept, bool [counted edges]."""
    if mask is not None:
        return mask.at[edges.edge_ids].get(mode="promise_in_bounds")
    nodes = jnp.arange(edges.num_nodes, dtype=jnp.int32)
    nodes = jnp.repeat(nodes, edges.degrees, total_repeat_length=edges.others.shape[0])
    return is_kept(None, *((nodes, edges.others) if nodes_are_senders else (edges.others, nodes)))


def _where(edges: CSR, mask: jax.Array) -> CSR:
    """Returns sorted edges of which only those of a mask count: they move up, and their blocks stay."""
    count = edges.others.shape[0]
    ends = jnp.cumsum(edges.degrees)
    is_kept = mask & (jnp.arange(count, dtype=jnp.int32) < edges.degrees.sum(dtype=jnp.int32))
    before = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(is_kept, dtype=jnp.int32)])
    places = jnp.where(is_kept, before[:-1], count)

    def moved(values: jax.Array | None) -> jax.Array | None:
        return None if values is None else jnp.zeros_like(values).at[places].set(values, mode="drop")

    others, starts = moved(edges.others), before[edges.starts]
    assert others is not None
    slots = edges.slots
    if slots is not None:
        blocks, place = jnp.divmod(jnp.maximum(slots, 0), edges.width)
        position = edges.starts.at[blocks].get(mode="fill", fill_value=0) + place
        is_left = (slots >= 0) & is_kept.at[position].get(mode="fill", fill_value=False)
        place = before[position] - starts.at[blocks].get(mode="fill", fill_value=0)
        slots = jnp.where(is_left, blocks * edges.width + place, -1)
    return dataclasses.replace(
        edges,
        others=others,
        edges=moved(edges.edges),
        slots=slots,
        starts=starts,
        counts=before[edges.starts + edges.counts] - starts,
        degrees=before[ends] - before[ends - edges.degrees],
    )
