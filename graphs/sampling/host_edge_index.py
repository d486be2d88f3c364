"""Edges in the host's memory, sorted by receiver, and neighbor sampling from them.

Nothing here is on a device, so that a graph may be larger than its memory.
"""

import dataclasses
import functools

import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import as_count, ascends, checked_ends

ALL = -1  # the fanout that takes all edges


@dataclasses.dataclass(frozen=True)
class HostEdges:
    """Edges of one type, sorted by the node that they enter. Make them with `host_edges`.

    Attributes:
      starts: int64 [targets + 1], where the edges of each target begin in `sources`.
      sources: int32 [edges], the node that each edge leaves.
      edge_ids: int64 [edges], which of the given edges each is; None where that was not to be kept.
      num_sources: how many nodes there are to send.

    Example:
      >>> edges = host_edges([2, 1, 0], [0, 1, 0], 3)
      >>> edges.in_degrees.tolist(), edges.sources.tolist()
      ([2, 1, 0], [2, 0, 1])
    """

    starts: np.ndarray
    sources: np.ndarray
    edge_ids: np.ndarray | None
    num_sources: int

    @property
    def num_targets(self) -> int:
        """How many nodes there are to receive."""
        return len(self.starts) - 1

    @property
    def num_edges(self) -> int:
        """How many edges there are."""
        return len(self.sources)

    @functools.cached_property
    def in_degrees(self) -> np.ndarray:
        """Int64 [targets], how many edges enter each node."""
        return np.diff(self.starts)

    @functools.cached_property
    def out_degrees(self) -> np.ndarray:
        """Int64 [sources], how many edges leave each node."""
        return np.bincount(self.sources, minlength=self.num_sources)

    @functools.cached_property
    def most_in(self) -> int:
        """The largest number of edges that enter a node."""
        return int(self.in_degrees.max(initial=0))

    @functools.cached_property
    def has_zero_in_degree(self) -> bool:
        """Whether some node is entered by no edge."""
        return bool((self.in_degrees == 0).any())


def host_edges(
    senders: Ids,
    receivers: Ids,
    n_node: int,
    n_receivers: int | None = None,
    *,
    keep_edge_ids: bool = False,
    where: str = "",
) -> HostEdges:
    """Returns edges for sampling, in the host's memory.

    Args:
      senders: int [edges], the node that each edge leaves.
      receivers: int [edges], the node that each edge enters. Edges that are sorted by it are not copied.
      n_node: how many nodes there are, or how many that send; at most 2**31 - 1.
      n_receivers: how many nodes there are that receive, where these are of another type.
      keep_edge_ids: whether it is kept which edge is which, as features of edges need it.
      where: of which edge type, for messages.

    Returns:
      The edges.

    Raises:
      TypeError: ids are not integers, or traced, or a number is not an integer.
      ValueError: ids have the wrong shape or are out of range; the message names the edge. Or a number is
        negative or beyond int32.

    Example:
      >>> host_edges([0, 1], [1, 1], 2).num_edges
      2
    """
    num_sources = as_count("n_node", n_node)
    num_targets = num_sources if n_receivers is None else as_count("n_receivers", n_receivers)
    senders, receivers = checked_ends(senders, receivers, num_sources, num_targets, where=where)
    starts = np.zeros(num_targets + 1, np.int64)
    np.cumsum(np.bincount(receivers, minlength=num_targets), out=starts[1:])
    is_sorted = ascends(receivers)
    order = None if is_sorted else np.argsort(receivers, kind="stable")
    edge_ids = None
    if keep_edge_ids:
        edge_ids = np.arange(len(receivers)) if order is None else order
    sources = senders if order is None else senders[order]
    return HostEdges(starts, sources.astype(np.int32, copy=False), edge_ids, num_sources)


def sample_in_edges(
    edges: HostEdges,
    nodes: np.ndarray,
    fanout: int,
    random: np.random.Generator,
    *,
    replace: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns edges that enter nodes, drawn uniformly and independently for each node.

    Args:
      edges: of which to draw.
      nodes: int [nodes], the targets.
      fanout: how many edges to draw for each; of nodes with fewer, all are taken. -1 for all of all.
      random: numpy's generator.
      replace: whether an edge may be drawn more than once; then nodes with any edge have `fanout`.

    Returns:
      For each edge which node it enters, int64 [drawn], a place in `nodes`, ascending; and which edge it
      is, int64 [drawn], a place in `edges.sources`.

    Raises:
      ValueError: the fanout is neither positive nor -1.

    Example:
      >>> edges = host_edges([1, 2, 0], [0, 0, 1], 3)
      >>> sample_in_edges(edges, np.array([0, 2, 1]), 2, np.random.default_rng(0))
      (array([0, 0, 2]), array([0, 1, 2]))

    Reference: Robert Floyd's algorithm for subsets, Bentley, Programming Pearls, CACM 30(9), 1987.
    """
    if fanout != ALL and fanout < 1:
        raise ValueError(f"fanout={fanout} must be positive, or -1 for all edges")
    first = edges.starts[nodes]
    degrees = edges.starts[np.asarray(nodes) + 1] - first
    if not replace and fanout != ALL:  # arrays [nodes, fanout] follow
        fanout = min(fanout, max(int(degrees.max(initial=0)), 1))
    if fanout == ALL:
        owners = np.repeat(np.arange(len(degrees)), degrees)
        begin = first - (np.cumsum(degrees) - degrees)
        return owners, begin[owners] + np.arange(len(owners))
    if replace:
        counts = np.where(degrees > 0, fanout, 0)
        offsets = (random.random((len(degrees), fanout)) * degrees[:, None]).astype(np.int64)
    else:
        counts = np.minimum(degrees, fanout)
        offsets = _subsets(degrees, fanout, random)
    owners, columns = np.nonzero(np.arange(fanout) < counts[:, None])
    return owners, first[owners] + offsets[owners, columns]


def _subsets(degrees: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Returns int64 [nodes, size]: in each row a subset of the numbers below a degree, or all of them."""
    offsets = np.tile(np.arange(size), (len(degrees), 1))
    is_large = degrees > size
    least = degrees[is_large] - size
    uniform = random.random((size, len(least)))
    drawn = np.empty((size, len(least)), np.int64)
    for i in range(size):
        last = least + i
        place = (uniform[i] * (last + 1)).astype(np.int64)
        is_taken = (drawn[:i] == place).any(axis=0)
        drawn[i] = np.where(is_taken, last, place)
    offsets[is_large] = drawn.T
    return offsets


def renumbered(first: np.ndarray, others: list[np.ndarray], count: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the nodes of several lists, each once but for the first list, and where each stands.

    Args:
      first: int [nodes], which keep their places.
      others: int [nodes] each.
      count: all ids are below it.

    Returns:
      Int32 [nodes], `first` and then the other nodes; and int32, the place of each node of `others`.
    """
    ids = np.concatenate([np.empty(0, np.int32), *others])
    places = np.empty(count, np.int32)  # what is not written below is not read
    places[ids] = -1
    places[first] = np.arange(len(first), dtype=np.int32)
    new = ids[places[ids] < 0]
    turn = np.arange(len(new), dtype=np.int32)
    places[new] = turn
    new = new[places[new] == turn]  # of equal ids, one has written last
    places[new] = len(first) + np.arange(len(new), dtype=np.int32)
    nodes = np.concatenate([first, new]).astype(np.int32, copy=False)
    return nodes, [places[other] for other in others]
