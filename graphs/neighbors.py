"""The edges sorted by one of their ends, in blocks of a few: what streaming walks over.

A block holds up to 32 edges of one node. What a block's edges make is added in registers, or one after the
other in float32, what a node's blocks make in blocks of blocks; see `accumulation`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.accumulation import BLOCK, Incidence, incidence_on_host

WIDTHS = (8, 16, BLOCK)
BLOCK_COST = 4  # a block costs as much as that many edges: its row is written and added once more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Neighbors:
    """The edges that leave each node, or enter each; those that count nowhere are in none.

    Attributes:
      others: int32 [counted edges], the node at the other end of each, sorted by the node at this end.
      edges: int32 [counted edges], which edge each is; None where edges have no places of their own.
      slots: int32 [edges], where each edge stands, its block times the width plus its place there; -1 if
        it counts nowhere; None where edges have no places of their own.
      starts: int32 [blocks], where each block begins in `others`.
      counts: int32 [blocks], how many edges it has.
      nodes: int32 [blocks], the node that has it.
      owners: the same, to add what blocks make.
      degrees: int32 [nodes], how many edges each node has.
      width: no block has more edges.
      num_edges: how many there are, those that count nowhere included.
    """

    others: jax.Array
    edges: jax.Array | None
    slots: jax.Array | None
    starts: jax.Array
    counts: jax.Array
    nodes: jax.Array
    owners: Incidence
    degrees: jax.Array
    width: int = dataclasses.field(metadata={"static": True})
    num_edges: int = dataclasses.field(metadata={"static": True})

    @property
    def num_nodes(self) -> int:
        """How many nodes there are at this end."""
        return self.degrees.shape[0]

    @property
    def num_blocks(self) -> int:
        """How many blocks there are."""
        return self.starts.shape[0]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BothWays:
    """The edges sorted by the node that they leave, and by the node that they enter."""

    by_source: Neighbors
    by_target: Neighbors

    def reversed(self) -> "BothWays":
        """Returns the edges turned round."""
        return BothWays(self.by_target, self.by_source)


def sorted_both_ways(
    senders: np.ndarray,
    receivers: np.ndarray,
    num_senders: int,
    num_receivers: int,
    *,
    have_places: bool,
) -> BothWays:
    """Returns the edges sorted by either end.

    Args:
      senders: int [edges]; edges with an end out of range count nowhere.
      receivers: int [edges].
      num_senders: how many nodes there are to send.
      num_receivers: how many nodes there are to receive.
      have_places: whether `edges` and `slots` are kept, which edge features need.
    """
    return BothWays(
        _sorted(senders, receivers, num_senders, num_receivers, have_places),
        _sorted(receivers, senders, num_receivers, num_senders, have_places),
    )


def _sorted(
    ids: np.ndarray, others: np.ndarray, num_nodes: int, num_others: int, have_places: bool
) -> Neighbors:
    """Returns the edges sorted by `ids`, the nodes at one end."""
    order = None if _ascend(ids, num_nodes) else np.argsort(ids, kind="stable")
    is_counted = (ids >= 0) & (ids < num_nodes) & (others >= 0) & (others < num_others)
    if not is_counted.all():
        order = np.arange(len(ids)) if order is None else order
        order = order[is_counted[order]]
    sorted_others = np.asarray(others if order is None else others[order], np.int32)
    degrees = np.bincount(ids[is_counted], minlength=num_nodes)
    width = min(WIDTHS, key=lambda width: _cost(degrees, width))

    num_blocks = -(-degrees // width)
    nodes = np.repeat(np.arange(num_nodes, dtype=np.int32), num_blocks)
    places = np.arange(len(nodes)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    ends = np.cumsum(degrees)
    starts = (ends - degrees)[nodes] + places * width
    counts = np.minimum(ends[nodes] - starts, width)
    edges = slots = None
    if have_places:
        edges = np.asarray(np.arange(len(ids)) if order is None else order, np.int32)
        blocks = np.repeat(np.arange(len(nodes)), counts)
        slots = np.full(len(ids), -1, np.int32)
        slots[edges] = blocks * width + np.arange(len(edges)) - starts[blocks]
    return Neighbors(
        _on_device(sorted_others),
        None if edges is None else _on_device(edges),
        None if slots is None else _on_device(slots),
        _on_device(starts),
        _on_device(counts),
        _on_device(nodes),
        incidence_on_host(nodes, num_nodes),
        _on_device(degrees),
        width,
        len(ids),
    )


def _on_device(array: np.ndarray) -> jax.Array:
    return jnp.asarray(array.astype(np.int32, copy=False))


def _ascend(ids: np.ndarray, num_nodes: int) -> bool:
    return bool((ids[1:] >= ids[:-1]).all()) and (len(ids) == 0 or 0 <= ids[0] < num_nodes)


def _cost(degrees: np.ndarray, width: int) -> int:
    """Returns what a pass over blocks of that width costs, in edges."""
    return int((-(-degrees // width)).sum()) * (width + BLOCK_COST)
