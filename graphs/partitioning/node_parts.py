"""Assigns the nodes of a graph to parts of similar size with few edges between them; runs on the host."""

from collections.abc import Callable, Mapping

import numpy as np

from jmp_train.graphs.sampling import HostEdges, host_edges
from jmp_train.graphs.structure import Graph, as_count, checked_word
from jmp_train.graphs.transforms import edges_on_host

SLACK = 1.05  # largest size of a part relative to the mean, so that nodes can join their neighbors
PASSES = 3  # over all nodes; more hardly improve the cut


def partition_nodes(graph: Graph | HostEdges, n_parts: int, *, method: str = "greedy") -> np.ndarray:
    """Returns the part of each node, for `partition`; parts have similar numbers of nodes and of incoming edges.

    Args:
      graph: a graph without padding, or its edges in the host's memory.
      n_parts: number of parts, at most the number of nodes.
      method: "greedy" visits the nodes in reverse Cuthill-McKee order, three times, and puts each where most of its
        neighbors are, unless there is little room left. It is a loop in Python, about 20 microseconds per node.
        "ranges" cuts the nodes in their given order into ranges: instantly, with a quality that depends on the order.

    Returns:
      Int32 [nodes], from 0 to `n_parts` - 1; the same on every run.

    Raises:
      TypeError: `graph` is neither, or `n_parts` is not an integer.
      ValueError: there are fewer nodes than parts, `method` is unknown, the graph is padded, or edges run between
        nodes of two types.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> two_triangles = from_edges([0, 2, 4, 1, 3, 5], [2, 4, 0, 3, 5, 1], 6)
      >>> parts = partition_nodes(two_triangles, 2)
      >>> len(set(parts[::2])), len(set(parts[1::2])), parts.tolist().count(0)
      (1, 1, 3)
      >>> partition_nodes(two_triangles, 2, method="ranges").tolist()
      [0, 0, 0, 1, 1, 1]

    Reference: Stanton and Kliot, Streaming Graph Partitioning for Large Distributed Graphs, KDD 2012 (linear
    deterministic greedy); Nishimura and Ugander, Restreaming Graph Partitioning, KDD 2013.
    """
    edges = edges_of(graph)
    count = checked_count(n_parts, edges)
    return _METHODS[checked_word("method", method, _METHODS)](edges, count)


def edges_of(graph: Graph | HostEdges) -> HostEdges:
    """Returns a graph's edges in the host's memory, sorted by receiver; raises as `partition_nodes` does.

    Args:
      graph: see `partition_nodes`.
    """
    if not isinstance(graph, Graph | HostEdges):
        raise TypeError(f"graph must be a Graph or HostEdges, got {type(graph).__name__}")
    if isinstance(graph, Graph):
        edges = edges_on_host(graph)
        have_places = graph.connections.ends is not None
        return host_edges(edges.senders, edges.receivers, graph.num_nodes, keep_edge_ids=have_places)
    if graph.num_sources != graph.num_targets:
        raise ValueError(
            f"graph has {graph.num_sources} sources and {graph.num_targets} targets: graphs with two types of "
            "nodes cannot be partitioned"
        )
    return graph


def checked_count(n_parts: int, edges: HostEdges) -> int:
    """Returns the number of parts; raises an error if there are fewer nodes.

    Args:
      n_parts: see `partition_nodes`.
      edges: edges of the graph.
    """
    count = as_count("n_parts", n_parts)
    if not 1 <= count <= edges.num_targets:
        raise ValueError(f"n_parts={count} must be between 1 and the {edges.num_targets} nodes of the graph")
    return count


def _loads(edges: HostEdges) -> np.ndarray:
    """Returns each node's fraction of all edges plus its fraction of all nodes, which measures work and memory."""
    return edges.in_degrees / max(edges.num_edges, 1) + 1 / edges.num_targets


def _ranges(edges: HostEdges, n_parts: int) -> np.ndarray:
    loads = _loads(edges)
    ends = np.cumsum(loads)
    middles = (ends - loads / 2) / ends[-1]
    return np.minimum(middles * n_parts, n_parts - 1).astype(np.int32)


def _greedy(edges: HostEdges, n_parts: int) -> np.ndarray:
    import scipy.sparse
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    count = edges.num_targets
    entries = np.ones(edges.num_edges, bool), edges.sources, edges.starts
    into = scipy.sparse.csr_array(entries, shape=(count, count))
    both = (into + into.T).tocsr()
    starts, neighbors = both.indptr, both.indices
    loads = _loads(edges)
    capacity = SLACK * loads.sum() / n_parts
    parts = np.full(count, n_parts, np.int32)  # `n_parts` for no part yet
    sizes = np.zeros(n_parts + 1)
    order = reverse_cuthill_mckee(both, symmetric_mode=True)
    for _ in range(PASSES):
        for node in order:
            sizes[parts[node]] -= loads[node]
            there = np.bincount(parts[neighbors[starts[node] : starts[node + 1]]], minlength=n_parts + 1)
            room = 1 - (sizes[:n_parts] + loads[node]) / capacity
            # A hundredth of a neighbor everywhere, so that nodes without neighbors go where most room is, and none to
            # full parts.
            parts[node] = ((there[:n_parts] + 0.01) * room).argmax()
            sizes[parts[node]] += loads[node]
    return parts


_METHODS: Mapping[str, Callable[[HostEdges, int], np.ndarray]] = {"greedy": _greedy, "ranges": _ranges}
