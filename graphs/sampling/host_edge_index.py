"""Edges in the host's memory, sorted by receiver, and neighbor sampling from them.

Nothing here is on a device, so a graph may be larger than the device's memory.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import as_count, ascends, checked_ends, ranges
from jmp_train.policies.pytrees import check_flag

ALL = -1  # the fanout that takes all edges


@dataclasses.dataclass(frozen=True)
class HostEdges:
    """Edges of one type, sorted by the node that they enter. Create them with `host_edges`.

    Attributes:
      starts: int64 [targets + 1], the start of each target's edges in `sources`.
      sources: int32 [edges], the node that each edge leaves.
      edge_ids: int64 [edges], the id of each edge in the given order; None if ids are not stored.
      num_sources: number of sending nodes.
      times: [edges], the time of each edge, ascending for each target; None if edges have no times.

    Example:
      >>> edges = host_edges([2, 1, 0], [0, 1, 0], 3)
      >>> edges.in_degrees.tolist(), edges.sources.tolist()
      ([2, 1, 0], [2, 0, 1])
    """

    starts: np.ndarray
    sources: np.ndarray
    edge_ids: np.ndarray | None
    num_sources: int
    times: np.ndarray | None = None

    @property
    def num_targets(self) -> int:
        """Number of receiving nodes."""
        return len(self.starts) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.sources)

    @property
    def receivers(self) -> np.ndarray:
        """Int32 [edges], the node that each edge enters, ascending."""
        return np.repeat(np.arange(self.num_targets, dtype=np.int32), self.in_degrees)

    @functools.cached_property
    def in_degrees(self) -> np.ndarray:
        """Int64 [targets], number of edges that enter each node."""
        return np.diff(self.starts)

    @functools.cached_property
    def out_degrees(self) -> np.ndarray:
        """Int64 [sources], number of edges that leave each node."""
        return np.bincount(self.sources, minlength=self.num_sources)

    @functools.cached_property
    def most_in(self) -> int:
        """The largest number of edges that enter a node."""
        return int(self.in_degrees.max(initial=0))

    @functools.cached_property
    def has_zero_in_degree(self) -> bool:
        """True if some node has no incoming edge."""
        return bool((self.in_degrees == 0).any())

    @functools.cached_property
    def leaving(self) -> "HostEdges":
        """The reversed edges, and so these edges sorted by the node that they leave, without their ids."""
        return host_edges(self.receivers, self.sources, self.num_targets, self.num_sources)

    def has_edges(self, senders: np.ndarray, receivers: np.ndarray) -> np.ndarray:
        """Returns whether there is an edge between each two nodes, bool [pairs].

        Args:
          senders: int [pairs].
          receivers: int [pairs].
        """
        wanted = senders.astype(np.int64) * self.num_targets + receivers
        order = np.argsort(wanted)  # a search for ascending numbers reads adjacent memory
        wanted = wanted[order]
        found = np.empty(len(wanted), bool)
        found[order] = self._pairs[np.searchsorted(self._pairs[:-1], wanted)] == wanted
        return found

    @functools.cached_property
    def _pairs(self) -> np.ndarray:
        """Int64 [different edges + 1], ascending with the sender, then the receiver; -1 in the end."""
        return np.append(np.unique(self.sources.astype(np.int64) * self.num_targets + self.receivers), -1)


def host_edges(
    senders: Ids,
    receivers: Ids,
    n_node: int,
    n_receivers: int | None = None,
    *,
    keep_edge_ids: bool = False,
    times: ArrayLike | Sequence[float] | None = None,
    where: str = "",
) -> HostEdges:
    """Returns edges for sampling, in the host's memory.

    Args:
      senders: int [edges], the node that each edge leaves.
      receivers: int [edges], the node that each edge enters. Sorted edges are not copied.
      n_node: number of nodes, or of sending nodes; at most 2**31 - 1.
      n_receivers: number of receiving nodes, if these are of another type.
      keep_edge_ids: True to store the ids of edges, which edge features need.
      times: real [edges], the time of each edge, by which those of a node are sorted; see `temporal_neighbors`.
      where: edge type, for messages.

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
    check_flag("keep_edge_ids", keep_edge_ids)
    num_sources = as_count("n_node", n_node)
    num_targets = num_sources if n_receivers is None else as_count("n_receivers", n_receivers)
    senders, receivers = checked_ends(senders, receivers, num_sources, num_targets, where=where)
    starts = np.zeros(num_targets + 1, np.int64)
    np.cumsum(np.bincount(receivers, minlength=num_targets), out=starts[1:])
    known = None if times is None else checked_times("times", times, len(receivers))
    if known is None:
        order = None if ascends(receivers) else np.argsort(receivers, kind="stable")
    else:
        order = np.lexsort((known, receivers))
        known = known[order]
    edge_ids = None
    if keep_edge_ids:
        edge_ids = np.arange(len(receivers)) if order is None else order
    sources = senders if order is None else senders[order]
    return HostEdges(starts, sources.astype(np.int32, copy=False), edge_ids, num_sources, known)


def checked_times(name: str, times: ArrayLike | Sequence[float], count: int) -> np.ndarray:
    """Returns checked times, real [count]; raises TypeError or ValueError.

    Args:
      name: the argument's name, for messages.
      times: the times.
      count: their number.
    """
    array = np.asarray(times)
    array = array if array.size else array.astype(np.float64)
    if not (np.issubdtype(array.dtype, np.integer) or np.issubdtype(array.dtype, np.floating)):
        raise TypeError(f"{name} must be real numbers, got {array.dtype}")
    if array.shape != (count,):
        raise ValueError(f"{name} must have shape ({count},), got shape {array.shape}")
    if np.isnan(array).any():
        raise ValueError(f"{name}[{int(np.isnan(array).argmax())}] is NaN")
    return array


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
      edges: the edges to draw from.
      nodes: int [nodes], the targets.
      fanout: number of edges to draw for each; nodes with fewer get all their edges. -1 for all edges of all nodes.
      random: NumPy's generator.
      replace: True to draw with replacement; then nodes with any edge have `fanout`.

    Returns:
      For each edge its target, int64 [drawn], an index into `nodes`, ascending; and the edge,
      int64 [drawn], an index into `edges.sources`.

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
    if not replace and fanout != ALL:  # the arrays below are [nodes, fanout]
        fanout = min(fanout, max(int(degrees.max(initial=0)), 1))
    if fanout == ALL:
        owners = np.repeat(np.arange(len(degrees)), degrees)
        return owners, ranges(first, degrees)
    if replace:
        counts = np.where(degrees > 0, fanout, 0)
        offsets = (random.random((len(degrees), fanout)) * degrees[:, None]).astype(np.int64)
    else:
        counts = np.minimum(degrees, fanout)
        offsets = random_subsets(degrees, fanout, random)
    owners, columns = np.nonzero(np.arange(fanout) < counts[:, None])
    return owners, first[owners] + offsets[owners, columns]


def random_subsets(degrees: np.ndarray, size: int, random: np.random.Generator) -> np.ndarray:
    """Returns int64 [nodes, size]: each row has a random subset of the numbers below a degree, or all of them."""
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
    """Returns the distinct nodes of several lists, the first list unchanged, and the index of each node.

    Args:
      first: int [nodes], which keep their indices.
      others: int [nodes] each.
      count: upper bound of the ids.

    Returns:
      Int32 [nodes], `first` and then the other nodes; and int32, the index of each node of `others`.
    """
    ids = np.concatenate([np.empty(0, np.int32), *others])
    places = np.empty(count, np.int32)  # only entries written below are read
    places[ids] = -1
    places[first] = np.arange(len(first), dtype=np.int32)
    new = ids[places[ids] < 0]
    turn = np.arange(len(new), dtype=np.int32)
    places[new] = turn
    new = new[places[new] == turn]  # among equal ids, the one written last
    places[new] = len(first) + np.arange(len(new), dtype=np.int32)
    nodes = np.concatenate([first, new]).astype(np.int32, copy=False)
    return nodes, [places[other] for other in others]
