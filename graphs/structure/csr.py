"""CSR in blocks of a few edges: the edges sorted by one end, for chunked kernels.

A block holds up to 32 edges of one node. Sums accumulate in rows. Each node has its own row, to which its first 32
blocks are added. Every further 32 blocks have a row of their own, which is finally added to the node's row
together with at most 31 other such rows; and so on. So no number is a long sequential sum, which keeps
rounding errors near 1e-6 of the terms' magnitudes (see `accumulation`), and few rows are added to the
nodes' rows.
"""

import dataclasses
from typing import Any

import jax
import numpy as np

from jmp_train.graphs.structure.counts import check_int32
from jmp_train.graphs.structure.edge_order import EdgeOrder
from jmp_train.graphs.structure.incidence import BLOCK

NOT_APART = 'the graph was made with formats=("csr",), which does not store single edges: add "coo" to formats'
WIDTHS = (8, 16, BLOCK)
BLOCK_COST = 4  # cost of a block in edges: its row is written and added once more


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CSR:
    """The edges that leave each node, or enter each; edges that do not count are left out.

    Attributes:
      others: int32 [counted edges], the node at the other end of each, sorted by the node at this end.
      edges: int32 [counted edges], the id of each edge; None if edges have no places of their own.
      slots: int32 [edges], the position of each edge: its block times the width plus its place there; -1 if
        it does not count; None if edges have no places of their own.
      starts: int32 [blocks], the start of each block in `others`.
      counts: int32 [blocks], number of edges in the block.
      nodes: int32 [blocks], node of the block.
      rows: int32 [blocks], the row to which the block is added, a node's or a further one.
      further: int32 [further rows] of each level, the rows to which they are finally added.
      degrees: int32 [nodes], number of edges of each node.
      width: largest number of edges per block.
      num_edges: number of edges, including those that do not count.
    """

    others: jax.Array
    edges: jax.Array | None
    slots: jax.Array | None
    starts: jax.Array
    counts: jax.Array
    nodes: jax.Array
    rows: jax.Array
    further: tuple[jax.Array, ...]
    degrees: jax.Array
    width: int = dataclasses.field(metadata={"static": True})
    num_edges: int = dataclasses.field(metadata={"static": True})

    @property
    def num_nodes(self) -> int:
        """Number of nodes at this end."""
        return self.degrees.shape[0]

    @property
    def edge_ids(self) -> jax.Array:
        """Int32 [counted edges], the id of each edge; raises ValueError if edges have no places of their own."""
        return _kept_apart(self.edges)

    @property
    def edge_slots(self) -> jax.Array:
        """Int32 [edges], the position of each edge; raises ValueError if edges have no places of their own."""
        return _kept_apart(self.slots)

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return self.starts.shape[0]

    @property
    def num_rows(self) -> int:
        """Number of rows in which sums accumulate."""
        return self.num_nodes + sum(level.shape[0] for level in self.further)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgePlaces:
    """The edges' ids and positions in blocks, which replace those of another `CSR`; see its attributes."""

    edges: jax.Array
    slots: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class CSRAndCSC:
    """The edges sorted by the node that they leave, and by the node that they enter.

    In a symmetric graph, a node has the same neighbors in both directions, so their arrays are stored only once.

    Attributes:
      leaving: the edges by the node that they leave; for a symmetric graph only their ids and positions, None if they
        have no places of their own.
      by_target: the edges by the node that they enter.
    """

    leaving: CSR | EdgePlaces | None
    by_target: CSR

    @property
    def by_source(self) -> CSR:
        """The edges sorted by the node that they leave."""
        if isinstance(self.leaving, CSR):
            return self.leaving
        if self.leaving is None:
            return self.by_target
        return dataclasses.replace(self.by_target, edges=self.leaving.edges, slots=self.leaving.slots)

    def reversed(self) -> "CSRAndCSC":
        """Returns the reversed edges."""
        return CSRAndCSC(self.by_target, self.by_source)


def host_csr_and_csc(
    by_source: EdgeOrder, by_target: EdgeOrder, *, have_places: bool, is_fixed: bool = False
) -> CSRAndCSC:
    """Returns the edges sorted by either end, in the host's memory.

    Args:
      by_source: the edges by the nodes that they leave; those with an end out of range do not count.
      by_target: the same edges by the nodes that they enter.
      have_places: True to store `edges` and `slots`, which edge features need.
      is_fixed: True if shapes must depend only on the counts, and are then large enough for any degrees.
    """
    common = None if is_fixed else _neighbors_if_symmetric(by_source, by_target, have_places)
    if common is None:
        return CSRAndCSC(_sorted(by_source, have_places, is_fixed), _sorted(by_target, have_places, is_fixed))
    if not have_places:
        return CSRAndCSC(None, _from_degrees(by_target.degrees, common, None, by_target.num_edges))
    source = _sorted(by_source, have_places, is_fixed)
    return CSRAndCSC(EdgePlaces(source.edge_ids, source.edge_slots), _sorted(by_target, have_places, is_fixed))


def _neighbors_if_symmetric(by_source: EdgeOrder, by_target: EdgeOrder, have_places: bool) -> np.ndarray | None:
    """Returns the neighbors by node, in one order, if they are the same in both directions; otherwise None.

    Edges without places of their own may be in any order within a node. Few graphs that are not symmetric have
    equal degrees in both directions, so most need little comparison, and no sorting.
    """
    orders = (by_source, by_target)
    if not all(order.all_count for order in orders) or not np.array_equal(by_source.degrees, by_target.degrees):
        return None
    if np.array_equal(by_source.sorted_others, by_target.sorted_others):
        return by_target.sorted_others
    if have_places:
        return None
    one, other = (_ascending_within_nodes(order.degrees, order.sorted_others) for order in orders)
    return other if np.array_equal(one, other) else None


def _ascending_within_nodes(degrees: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Returns the neighbors of each node in ascending order."""
    count = max(len(degrees), 1)  # other ends are among the same nodes
    keys = np.repeat(np.arange(len(degrees)) * count, degrees) + others
    keys.sort()
    return (keys % count).astype(np.int32)


def _sorted(order: EdgeOrder, have_places: bool, is_fixed: bool) -> CSR:
    """Returns the edges sorted by the nodes at one end."""
    if order.all_count and not have_places:
        return _from_degrees(order.degrees, order.sorted_others, None, order.num_edges, is_fixed=is_fixed)
    edges = np.arange(order.num_edges, dtype=np.int32) if order.edges is None else order.edges
    if order.all_count:
        return _from_degrees(order.degrees, order.sorted_others, edges, order.num_edges, order=order, is_fixed=is_fixed)
    ids, others = order.ids[edges], order.sorted_others
    is_counted = (ids >= 0) & (ids < order.num_nodes) & (others >= 0) & (others < order.num_others)
    degrees = np.bincount(ids[is_counted], minlength=order.num_nodes)
    edges = edges[is_counted] if have_places else None
    return _from_degrees(degrees, others[is_counted], edges, order.num_edges, is_fixed=is_fixed)


def from_degrees(
    degrees: np.ndarray, others: np.ndarray, edges: np.ndarray | None, num_edges: int, *, is_fixed: bool = False
) -> CSR:
    """Returns sorted edges in blocks.

    Args:
      degrees: int [nodes], number of edges of each node.
      others: int [counted edges], the nodes at the other ends, sorted by the node at this end.
      edges: int [counted edges], ids of these edges; None if they have no places of their own.
      num_edges: number of edges, including those that do not count.
      is_fixed: see `host_csr_and_csc`.

    Raises:
      ValueError: int32 cannot number the places in the blocks, or the rows.
    """
    return jax.device_put(_from_degrees(degrees, others, edges, num_edges, is_fixed=is_fixed))


def _from_degrees(
    degrees: np.ndarray,
    others: np.ndarray,
    edges: np.ndarray | None,
    num_edges: int,
    *,
    order: EdgeOrder | None = None,
    is_fixed: bool = False,
) -> CSR:
    """Returns the result of `from_degrees`, in the host's memory; `order` has the same edges, if all count."""
    num_nodes = len(degrees)

    def most_blocks(width: int) -> int:
        if not is_fixed:
            return int((-(-degrees // width)).sum())
        return (num_edges + (width - 1) * min(num_nodes, num_edges)) // width

    width = min(WIDTHS, key=lambda width: most_blocks(width) * (width + BLOCK_COST))
    length = most_blocks(width)  # blocks without edges follow the needed ones
    if edges is not None:
        check_int32("places of the sorted edges are", length * width)
    num_blocks = -(-degrees // width)
    nodes = np.repeat(np.arange(num_nodes), num_blocks)
    places = np.arange(len(nodes)) - np.repeat(np.cumsum(num_blocks) - num_blocks, num_blocks)
    ends = np.cumsum(degrees)
    starts = (ends - degrees)[nodes] + places * width
    counts = np.minimum(ends[nodes] - starts, width)
    slots = None
    if edges is not None:
        first_slots = (np.cumsum(num_blocks) - num_blocks) * width
        shifts = (first_slots - (ends - degrees)).astype(np.int32)
        if order is not None:
            slots = shifts[order.ids] + order.places
        else:
            slots = np.full(num_edges, -1, np.int32)
            slots[edges] = np.repeat(shifts, degrees) + np.arange(len(edges), dtype=np.int32)
    rows, *further = _rows(nodes, num_nodes, length if is_fixed else None)
    num_rows = num_nodes + sum(map(len, further))
    check_int32("rows of the sorted edges are", num_rows)
    num_others = num_edges if is_fixed else len(others)
    return CSR(
        _int32(_filled(others, num_others)),
        None if edges is None else _int32(_filled(edges, num_others)),
        None if slots is None else _int32(slots),
        _int32(_filled(starts, length)),
        _int32(_filled(counts, length)),
        _int32(_filled(nodes, length, num_nodes - 1)),
        _int32(_filled(rows, length, num_rows)),  # beyond the last one
        tuple(map(_int32, further)),
        _int32(degrees),
        width,
        num_edges,
    )


def _rows(nodes: np.ndarray, num_nodes: int, most: int | None) -> list[np.ndarray]:
    """Returns the rows to which blocks are added, then those to which the further rows are added, level by level.

    Args:
      nodes: int [blocks], the node of each block, ascending.
      num_nodes: number of nodes.
      most: largest number of blocks, which determines the lengths of the levels; None for the number of these blocks.
    """
    levels, num_rows, owners = [], num_nodes, nodes
    while True:
        first = np.searchsorted(owners, owners)  # owners ascend, so this is where each one's entries begin
        groups = (np.arange(len(owners)) - first) // BLOCK
        is_further = groups > 0
        starts_row = is_further & ((np.arange(len(owners)) - first) % BLOCK == 0)
        rows = np.where(is_further, num_rows + np.cumsum(starts_row) - 1, owners)
        levels.append(rows if most is None or not levels else _filled(rows, most))
        most = None if most is None else (most - 1) // BLOCK
        owners = owners[starts_row]
        num_further = len(owners) if most is None else most
        if num_further < 1:
            return levels
        num_rows += num_further


def _kept_apart(places: jax.Array | None) -> jax.Array:
    if places is None:
        raise ValueError(NOT_APART)
    return places


def _filled(array: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    missing = length - len(array)
    return np.pad(array, (0, missing), constant_values=value) if missing else array


def _int32(array: np.ndarray) -> Any:
    return array.astype(np.int32, copy=False)
