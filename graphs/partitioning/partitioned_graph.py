"""`partition`: splits a graph by nodes into a part per device, all of the same shapes; runs on the host.

The parts have similar numbers of nodes, with few edges between them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling import HostEdges, host_edges
from jmp_train.graphs.structure import (
    DEFAULT_FORMATS,
    Graph,
    GraphPart,
    GraphStack,
    as_count,
    check_formats,
    check_int32,
    check_rows,
    checked_word,
    filled,
    known_ids,
    make_adjacency_checked,
    ranges,
    stack,
)
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


@dataclasses.dataclass(frozen=True, eq=False)
class PartitionedGraph:
    """A graph split into parts, in the host's memory. Create it with `partition`.

    Attributes:
      parts: a `graphs.stack` of a `GraphPart` for each device, for a batch in place of a graph.
      nodes: int32 [parts, rows], the node of each part's own rows, ascending; -1 for padding.
      num_nodes: number of nodes of the graph.
      num_edges: number of edges of the graph.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import from_edges
      >>> cut = partition(from_edges([0, 1, 2], [1, 2, 0], 3), 2, method="ranges")
      >>> cut.nodes.tolist(), cut.take(np.array([5, 6, 7])).tolist()
      ([[0, -1], [1, 2]], [5, 0, 6, 7])
      >>> cut.restore(np.array([5, 0, 6, 7])).tolist(), cut.halo_rows
      ([5, 6, 7], 2)
    """

    parts: GraphStack
    nodes: np.ndarray
    num_nodes: int
    num_edges: int

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Int64 [nodes], the row of each node in the result of `take`."""
        is_node = self.nodes.ravel() >= 0
        places = np.empty(self.num_nodes, np.int64)
        places[self.nodes.ravel()[is_node]] = np.flatnonzero(is_node)
        return places

    @property
    def halo_rows(self) -> int:
        """Number of rows that all devices send for a layer, without padding: the nodes seen by other parts."""
        return int((self.parts.graphs.sent_rows < self.nodes.shape[1]).sum())

    def take(self, features: ArrayLike, *, fill: float = 0) -> np.ndarray:
        """Returns features of all nodes in the order of the parts, to be sharded along the first axis.

        Args:
          features: [nodes, ...].
          fill: value for padding; -1 in labels marks rows without a node.

        Returns:
          [parts * rows, ...], in the host's memory.

        Raises:
          ValueError: there is another number of rows.
        """
        return _taken(features, self.nodes, self.num_nodes, "nodes", fill)

    def take_edges(self, features: ArrayLike, *, fill: float = 0) -> np.ndarray:
        """Returns features of all edges in the order of the parts, to be sharded along the first axis.

        Args:
          features: [edges, ...], in the given order of the edges.
          fill: value for padding.

        Returns:
          [parts * edges of a part, ...], in the host's memory.

        Raises:
          ValueError: there is another number of rows, or the graph does not store single edges.
        """
        edge_ids = self.parts.graphs.edge_ids
        if edge_ids is None:
            raise ValueError('the parts do not store their edges: make the graph with formats that include "coo"')
        return _taken(features, edge_ids, self.num_edges, "edges", fill)

    def restore(self, rows: ArrayLike) -> np.ndarray:
        """Returns rows of all parts, such as logits, in the order of the nodes: the inverse of `take`.

        Args:
          rows: [parts * rows, ...].

        Returns:
          [nodes, ...].

        Raises:
          ValueError: there is another number of rows.
        """
        array = np.asarray(rows)
        if array.ndim == 0 or len(array) != self.nodes.size:
            raise ValueError(f"rows must have {self.nodes.size} rows, those of all parts, got shape {array.shape}")
        return array[self.places]


def _taken(rows: ArrayLike, ids: np.ndarray, count: int, kind: str, fill: float) -> np.ndarray:
    array = np.asarray(rows)
    check_rows("features", array.shape, count, kind)
    ids = ids.ravel()
    result = np.full((len(ids), *array.shape[1:]), fill, array.dtype)
    result[ids >= 0] = array[ids[ids >= 0]]
    return result


def partition(
    graph: Graph | HostEdges,
    n_parts: int,
    *,
    method: str | Ids = "greedy",
    axis: str = "data",
    formats: Sequence[str] = DEFAULT_FORMATS,
) -> PartitionedGraph:
    """Splits a graph by nodes: each part has some of the nodes and all edges that enter these.

    A layer then needs from other parts the rows of nodes that send to its own, the halo, which devices exchange. All
    parts are padded to the same shapes. It runs on the host, where the result stays; each of several processes computes
    the same parts.

    Args:
      graph: a graph without padding, whose own features are not used, or its edges in the host's memory.
      n_parts: number of parts, one per device.
      method: see `partition_nodes`; or int [nodes], the part of each node, for example from `pymetis.part_graph`.
      axis: the mesh axis of the devices.
      formats: the indices to create, from "coo" and "csr", see `from_edges`.

    Returns:
      The parts.

    Raises:
      TypeError: see `partition_nodes`.
      ValueError: see `partition_nodes`; or the parts of nodes have another length or are out of range, or formats are
        unknown or have "mailbox".

    Example:
      >>> import jax, numpy as np
      >>> from jax.sharding import Mesh, PartitionSpec as P
      >>> from jmp_train import graphs
      >>> mesh = Mesh(jax.devices()[:1], ("data",))
      >>> cut = graphs.partition(graphs.from_edges([0, 1, 2], [1, 2, 0], 3), mesh.size)
      >>> def layer(parts, features):  # on each device with its own part
      ...     return graphs.graph_conv(parts[0], features)
      >>> run = jax.shard_map(layer, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
      >>> rows = jax.jit(run)(cut.parts, cut.take(np.float32([[1], [2], [4]])))
      >>> cut.restore(rows).ravel().tolist()
      [4.0, 1.0, 2.0]

    Reference: full-graph training with halo exchange as in Md et al., DistGNN, SC 2021,
    https://arxiv.org/abs/2104.06700.
    """
    edges = edges_of(graph)
    count = checked_count(n_parts, edges)
    check_formats(formats)
    if "mailbox" in formats:
        raise ValueError('formats has "mailbox", whose shapes differ from part to part')
    owners = partition_nodes(edges, count, method=method) if isinstance(method, str) else _checked(method, edges, count)
    own = [np.flatnonzero(owners == part).astype(np.int32) for part in range(count)]
    rows = max(map(len, own))
    local = np.empty(edges.num_targets, np.int64)  # each node's row in its part
    for nodes in own:
        local[nodes] = np.arange(len(nodes))
    halos = [_halo(edges, nodes, owners, count, part) for part, nodes in enumerate(own)]
    most_sent = max(len(nodes) for halo in halos for nodes in halo)
    num_edges = max(int(edges.in_degrees[nodes].sum()) for nodes in own)
    check_int32("a part has", rows + count * most_sent, "rows")
    with jax.default_device(_cpu()):  # the accelerator may be too small for the whole graph
        parts = [
            _part(edges, part, own, halos, local, (rows, most_sent, num_edges), axis, formats) for part in range(count)
        ]
    nodes = np.stack([filled(nodes, rows, -1) for nodes in own])
    return PartitionedGraph(stack(parts), nodes, edges.num_targets, edges.num_edges)


def _cpu() -> Any:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None


def _checked(method: Ids, edges: HostEdges, count: int) -> np.ndarray:
    """Returns the checked parts of the nodes, given as an array."""
    owners = known_ids("method", method, count, "parts")
    if len(owners) != edges.num_targets:
        raise ValueError(
            f"method must be a name, or integers [{edges.num_targets}], the part of each node, got shape {owners.shape}"
        )
    return owners.astype(np.int32)


def _halo(edges: HostEdges, own: np.ndarray, owners: np.ndarray, count: int, part: int) -> list[np.ndarray]:
    """Returns the nodes of each other part that send to nodes of this one, ascending."""
    is_seen = np.zeros(edges.num_sources, bool)
    is_seen[edges.sources[_places_of_edges(edges, own)]] = True
    is_seen[own] = False
    seen = np.flatnonzero(is_seen)
    return [seen[owners[seen] == other] for other in range(count)]


def _places_of_edges(edges: HostEdges, nodes: np.ndarray) -> np.ndarray:
    """Returns the places in `edges.sources` of all edges that enter nodes, node by node."""
    return ranges(edges.starts[nodes], edges.in_degrees[nodes])


def _part(
    edges: HostEdges,
    part: int,
    own: list[np.ndarray],
    halos: list[list[np.ndarray]],
    local: np.ndarray,
    shape: tuple[int, int, int],
    axis: str,
    formats: Sequence[str],
) -> GraphPart:
    """Returns a part of a graph, with its arrays in the host's memory.

    Args:
      edges: edges of the whole graph.
      part: index of the part.
      own: the nodes of each part.
      halos: for each part, the nodes of each other one that it sees.
      local: for each node, its row in its part.
      shape: padded numbers of own rows, rows sent to each part, and edges.
      axis: see `partition`.
      formats: see `partition`.
    """
    rows, most_sent, num_edges = shape
    nodes, num_sources = own[part], rows + len(own) * most_sent
    sources = np.full(num_sources, -1, np.int32)
    sources[: len(nodes)] = nodes
    for other, seen in enumerate(halos[part]):
        start = rows + other * most_sent
        sources[start : start + len(seen)] = seen
    place = np.empty(edges.num_sources, np.int64)  # only places of visible nodes are set and read
    place[sources[sources >= 0]] = np.flatnonzero(sources >= 0)
    places = _places_of_edges(edges, nodes)
    receivers = np.repeat(np.arange(len(nodes)), edges.in_degrees[nodes])
    adjacency = make_adjacency_checked(
        filled(place[edges.sources[places]], num_edges, num_sources),
        filled(receivers, num_edges, rows),
        num_sources,
        rows,
        formats=formats,
        is_fixed=True,
    )
    adjacency = dataclasses.replace(adjacency, has_zero_in_degree=edges.has_zero_in_degree)
    out_degrees = np.where(sources >= 0, edges.out_degrees[sources], 0).astype(np.int32)
    arrays: dict[str, Any] = {
        "whole_degrees": (out_degrees, filled(edges.in_degrees[nodes], rows, 0)),
        "edge_ids": None if edges.edge_ids is None else filled(edges.edge_ids[places], num_edges, -1),
        "is_node": np.arange(rows) < len(nodes),
        "sent_rows": np.stack([filled(local[halo[part]], most_sent, rows) for halo in halos]),
    }
    return jax.tree.map(np.asarray, GraphPart(connections=adjacency, axis_name=axis, **arrays))
