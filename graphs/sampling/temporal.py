"""Neighbors before a time: of each node, those of its edges that are earlier."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import HostEdges, checked_times, random_subsets
from jmp_train.graphs.structure import as_count, checked_word, known_ids

STRATEGIES = ("last", "uniform")


class TemporalNeighbors(NamedTuple):
    """Neighbors of nodes before a time, in the host's memory; their number of places is the same for all nodes.

    Attributes:
      nodes: int32 [nodes, k], the senders; -1 for places without one.
      edges: int32 [nodes, k], the ids of the edges; -1 for places without one, and for all if ids are not stored.
      times: [nodes, k], the times of the edges; 0 for places without one.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([1, 2], [0, 0], 3, times=[10, 20])
      >>> temporal_neighbors(edges, [0], [15], 2).nodes
      array([[ 1, -1]], dtype=int32)
    """

    nodes: np.ndarray
    edges: np.ndarray
    times: np.ndarray


def temporal_neighbors(
    edges: HostEdges,
    nodes: Ids,
    times: ArrayLike | Sequence[float],
    k: int,
    random: np.random.Generator | None = None,
    *,
    strategy: str = "last",
) -> TemporalNeighbors:
    """Returns up to `k` edges that entered each node before a time, the latest ones or random ones.

    For further hops, call it again with the neighbors and their times.

    Args:
      edges: the edges of one type, with times.
      nodes: int [nodes]; -1 for a node without neighbors.
      times: real [nodes], a time for each node; only earlier edges are taken.
      k: number of places per node.
      random: NumPy's generator, which "uniform" needs.
      strategy: "last" for the latest edges, the latest first; among equal times, the last one in the given order first.
        "uniform" for edges drawn uniformly, without replacement.

    Returns:
      The neighbors.

    Raises:
      TypeError: nodes or `k` are not integers, or times are not real.
      ValueError: edges have no times, a node is out of range, lengths differ, the strategy is unknown, or there is no
        generator.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([1, 2, 1, 2], [0, 0, 0, 0], 3, times=[1.0, 2.0, 3.0, 4.0], keep_edge_ids=True)
      >>> found = temporal_neighbors(edges, [0, 0], [3.5, 1.0], 2)
      >>> found.nodes.tolist(), found.edges.tolist(), found.times.tolist()
      ([[1, 2], [-1, -1]], [[2, 1], [-1, -1]], [[3.0, 2.0], [0.0, 0.0]])

    Reference: Rossi et al., Temporal Graph Networks, https://arxiv.org/abs/2006.10637; the `temporal_strategy` of
    PyTorch Geometric's NeighborLoader.
    """
    if edges.times is None:
        raise ValueError("edges have no times: pass times= to host_edges")
    checked_word("strategy", strategy, STRATEGIES)
    k, ids = as_count("k", k), known_ids("nodes", nodes, edges.num_targets, least=-1)
    starts = edges.starts[np.maximum(ids, 0)] if edges.num_targets else np.zeros(len(ids), np.int64)
    ends = _ends_before(edges, ids, checked_times("times", times, len(ids)), starts)
    degrees = ends - starts
    if strategy == "last":
        offsets = degrees[:, None] - 1 - np.arange(k)
    elif random is None:
        raise ValueError('strategy="uniform" needs random, a NumPy generator')
    else:
        offsets = random_subsets(degrees, k, random)
    exists = (offsets >= 0) & (offsets < degrees[:, None])
    places = starts[:, None] + offsets

    def rows(values: np.ndarray, missing: int) -> np.ndarray:
        found = np.full(exists.shape, missing, values.dtype)
        found[exists] = values[places[exists]]
        return found

    of_edges = np.full(edges.num_edges, -1) if edges.edge_ids is None else edges.edge_ids
    return TemporalNeighbors(rows(edges.sources, -1), rows(of_edges.astype(np.int32), -1), rows(edges.times, 0))


def _ends_before(edges: HostEdges, nodes: np.ndarray, times: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Returns, per node, the place after its last edge before a time, int64 [nodes], found by binary search."""
    assert edges.times is not None  # checked before
    low, high = starts.copy(), np.where(nodes >= 0, edges.starts[np.minimum(nodes + 1, edges.num_targets)], starts)
    while (is_open := low < high).any():
        middle = (low + high) // 2
        is_before = is_open & (edges.times[np.where(is_open, middle, 0)] < times)
        low = np.where(is_before, middle + 1, low)
        high = np.where(is_open & ~is_before, middle, high)
    return low
