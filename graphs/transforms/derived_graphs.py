"""Graphs derived from a graph: its line graph, with a virtual node, of one type or of several; on the host.

Reference: line_graph, to_homogeneous and to_heterogeneous of Deep Graph Library, https://www.dgl.ai.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.sampling import take_rows
from jmp_train.graphs.structure import (
    EdgeType,
    Graph,
    HeteroGraph,
    accepts_jraph,
    check_int32,
    check_known,
    from_edges,
    hetero_from_edges,
    known_ids,
    ranges,
)
from jmp_train.graphs.transforms.edge_lists import (
    ID,
    EdgeList,
    check_keeps_edges,
    edges_on_host,
    ends_on_host,
    formats_of,
    owning_graphs,
    with_parts,
)

TYPE = "_TYPE"  # the feature with the type of a node or an edge, like DGL's NTYPE and ETYPE


@accepts_jraph
def line_graph(graph: Graph, backtracking: bool = True, *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the line graph, whose nodes are the edges of a graph; runs on the host.

    An edge sends to each edge that leaves the node it enters. A self-loop sends to itself.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      backtracking: False to leave out the edges from (u, v) to (v, u), and so those from a self-loop to itself.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The line graph: edge features of the graph are its node features. Its edges are sorted by sender, then receiver.
      In a batch, the line graph of each graph.

    Raises:
      TypeError: the graph is traced.
      ValueError: the graph is padded, or does not store single edges; or the line graph has more edges than int32 can
        number.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> line = line_graph(from_edges([0, 1, 1], [1, 0, 2], 3, edges={"w": [1.0, 2.0, 4.0]}))
      >>> line.senders.tolist(), line.receivers.tolist(), line.nodes["w"].tolist()
      ([0, 0, 1], [1, 2, 0], [1.0, 2.0, 4.0])
    """
    edges = edges_on_host(graph)
    check_keeps_edges(graph.connections)
    leaving = np.argsort(edges.senders, kind="stable")  # the edges by the node that they leave
    degrees = np.bincount(edges.senders, minlength=graph.num_nodes)
    counts = degrees[edges.receivers]
    check_int32("the line graph has", int(counts.sum()), "edges")
    senders = np.repeat(np.arange(len(counts)), counts)
    receivers = leaving[ranges((np.cumsum(degrees) - degrees)[edges.receivers], counts)]
    if not backtracking:
        is_kept = edges.receivers[receivers] != edges.senders[senders]
        senders, receivers = senders[is_kept], receivers[is_kept]
    owners = owning_graphs(graph)[edges.receivers]
    return with_parts(graph, edges.features, owners, EdgeList(senders, receivers, {}), formats)


@accepts_jraph
def add_virtual_node(graph: Graph, *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the graph with one more node that sends to all nodes and receives from all; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph. The virtual node is the last one. The edges to it, and then those from it, come after the others. Its
      features and those of its edges are 0. In a batch, each graph has a virtual node, its last one:
      `jnp.cumsum(graph.n_node) - 1`.

    Raises:
      TypeError: the graph is traced.
      ValueError: the graph is padded.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = add_virtual_node(from_edges([0], [1], 2))
      >>> graph.num_nodes, graph.senders.tolist(), graph.receivers.tolist()
      (3, [0, 0, 1, 2, 2], [1, 2, 2, 0, 1])

    Reference: Gilmer et al., Neural Message Passing for Quantum Chemistry, https://arxiv.org/abs/1704.01212; PyTorch
    Geometric's VirtualNode.
    """
    edges, owners = edges_on_host(graph), owning_graphs(graph)
    count, num_graphs = graph.num_nodes, len(graph.n_node)
    new = np.arange(count) + owners  # of each node; earlier graphs have a virtual node each
    virtual = np.cumsum(np.asarray(graph.n_node)) + np.arange(num_graphs)
    rows = np.full(count + num_graphs, -1)
    rows[new] = np.arange(count)
    nodes = {name: take_rows(np.asarray(features), rows) for name, features in graph.nodes.items()}
    places = np.concatenate([np.arange(len(edges.senders)), np.full(2 * count, -1)])
    features = {name: take_rows(values, places) for name, values in edges.features.items()}
    hubs = virtual[owners]
    senders = np.concatenate([new[edges.senders], new, hubs])
    receivers = np.concatenate([new[edges.receivers], hubs, new])
    all_owners = np.repeat(np.arange(num_graphs), np.asarray(graph.n_node) + 1)
    return with_parts(graph, nodes, all_owners, EdgeList(senders, receivers, features), formats)


def to_homogeneous(
    graph: HeteroGraph,
    nodes: Sequence[str] = (),
    edges: Sequence[str] = (),
    *,
    formats: Sequence[str] = ("coo", "csr"),
) -> Graph:
    """Returns a graph of several types as one of a single type; runs on the host.

    Nodes are sorted by type, in the order of `graph.node_types`, and edges in that of `graph.edge_types`. For both, the
    feature "_TYPE" is the index of the type in that order, and "_ID" the id within the type, int32.

    Args:
      graph: a graph of several types.
      nodes: the names of node features to keep; all types have them, in one shape and dtype.
      edges: the names of edge features to keep, likewise.
      formats: see `from_edges`; must include "coo", because edges have features.

    Returns:
      The graph.

    Raises:
      TypeError: the graph is traced, or of a single type already.
      ValueError: a feature is missing in a type, or differs between types in shape or dtype.

    Example:
      >>> from jmp_train.graphs import hetero_from_edges
      >>> graph = hetero_from_edges({("user", "plays", "game"): ([0, 1], [0, 0])}, {"user": 2, "game": 1})
      >>> alone = to_homogeneous(graph)
      >>> alone.senders.tolist(), alone.receivers.tolist(), alone.nodes["_TYPE"].tolist(), alone.nodes["_ID"].tolist()
      ([0, 1], [2, 2], [0, 0, 1], [0, 1, 0])
    """
    if not isinstance(graph, HeteroGraph):
        raise TypeError(f"graph must be a HeteroGraph, got {type(graph).__name__}")
    check_known("graph", graph, "transforms run outside of jit")
    counts = [count for _, count in graph.n_node]
    starts = dict(zip(graph.node_types, np.cumsum([0, *counts]).tolist(), strict=False))
    senders, receivers, sizes = [], [], []
    for kind in graph.edge_types:
        ends = ends_on_host(graph.connections[kind])
        senders.append(ends[0].astype(np.int64) + starts[kind[0]])
        receivers.append(ends[1].astype(np.int64) + starts[kind[2]])
        sizes.append(len(ends[0]))
    of_nodes = {name: _joined("nodes", name, [graph.nodes[kind] for kind in graph.node_types]) for name in nodes}
    of_edges = {name: _joined("edges", name, [graph.edges[kind] for kind in graph.edge_types]) for name in edges}
    return from_edges(
        np.concatenate([np.empty(0, np.int64), *senders]),
        np.concatenate([np.empty(0, np.int64), *receivers]),
        sum(counts),
        {**of_nodes, **_origins(counts)},
        {**of_edges, **_origins(sizes)},
        formats=formats,
    )


def to_heterogeneous(
    graph: Graph,
    node_types: Sequence[str],
    edge_types: Sequence[str | EdgeType],
    node_field: str = "_TYPE",
    edge_field: str = "_TYPE",
    *,
    formats: Sequence[str] | None = None,
) -> HeteroGraph:
    """Converts a graph with types in features of nodes and edges to one of several types; runs on the host.

    Args:
      graph: a single graph of one type, without padding.
      node_types: the names of the node types.
      edge_types: the edge types. A name stands for all triples with it that occur; the edges of a
        triple may connect no other types.
      node_field: the node feature, int [nodes], with the index of each node's type in `node_types`.
      edge_field: the edge feature, int [edges], with the index of each edge's type in `edge_types`.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph. Nodes and edges of a type keep their order and their features, except their type; "_ID" is their
      id in `graph`, int32.

    Raises:
      TypeError: the graph is traced or of several types, or a field is not integer.
      ValueError: the graph is padded, or does not store single edges; a field is missing or out of range; or an edge
        connects other types than its triple. The message names the edge.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [2, 2], 3, {"_TYPE": [0, 0, 1]}, {"_TYPE": [0, 0]})
      >>> several = to_heterogeneous(graph, ["user", "game"], ["plays"])
      >>> several.edge_types, several.num_nodes("user"), several.receivers("plays").tolist()
      ((('user', 'plays', 'game'),), 2, [0, 0])
    """
    whole = edges_on_host(graph)
    check_keeps_edges(graph.connections)
    of_node = _types("nodes", node_field, graph.nodes, len(node_types))
    of_edge = _types("edges", edge_field, graph.edges, len(edge_types))
    places = np.zeros(graph.num_nodes, np.int64)  # index of a node among those of its type
    members = [np.flatnonzero(of_node == place) for place in range(len(node_types))]
    for ids in members:
        places[ids] = np.arange(len(ids))
    nodes = {kind: _taken(graph.nodes, ids, node_field) for kind, ids in zip(node_types, members, strict=True)}
    ends, edges = {}, {}
    for kind, ids in _edges_by_type(node_types, edge_types, of_node[whole.senders], of_node[whole.receivers], of_edge):
        ends[kind] = (places[whole.senders[ids]], places[whole.receivers[ids]])
        edges[kind] = _taken(whole.features, ids, edge_field)
    counts = {kind: len(ids) for kind, ids in zip(node_types, members, strict=True)}
    return hetero_from_edges(ends, counts, nodes, edges, formats=formats_of(graph, formats))


def _edges_by_type(
    node_types: Sequence[str],
    edge_types: Sequence[str | EdgeType],
    of_sender: np.ndarray,
    of_receiver: np.ndarray,
    of_edge: np.ndarray,
) -> list[tuple[EdgeType, np.ndarray]]:
    """Returns each triple with its edges, int64, ascending."""
    found = []
    for place, kind in enumerate(edge_types):
        ids = np.flatnonzero(of_edge == place)
        name = kind if isinstance(kind, str) else kind[1]
        pairs = of_sender[ids] * len(node_types) + of_receiver[ids]
        triples = {
            (node_types[pair // len(node_types)], name, node_types[pair % len(node_types)]): ids[pairs == pair]
            for pair in np.unique(pairs).tolist()
        }
        if not isinstance(kind, str):
            for other, wrong in triples.items():
                if other != kind:
                    raise ValueError(
                        f"edge {wrong[0]} is of type {kind!r}, but connects {other[0]!r} with {other[2]!r}"
                    )
            triples = {kind: ids}
        found += triples.items()
    return found


def _joined(of: str, name: str, by_type: Sequence[Mapping[str, jax.Array]]) -> np.ndarray:
    """Returns the rows of all types, one type after the other."""
    rows = []
    for place, features in enumerate(by_type):
        if name not in features:
            raise ValueError(f"{of}: type {place} has no feature {name!r}")
        rows.append(np.asarray(features[name]))
        if rows[0].shape[1:] != rows[-1].shape[1:] or rows[0].dtype != rows[-1].dtype:
            first, this = ((array.dtype.name, array.shape[1:]) for array in (rows[0], rows[-1]))
            raise ValueError(f"{of}[{name!r}] has rows {this} in type {place}, but {first} in type 0")
    return np.concatenate(rows)


def _origins(counts: Sequence[int]) -> dict[str, np.ndarray]:
    """Returns the types and the ids within them, given the number of nodes or edges of each type."""
    none = np.empty(0, np.int32)
    ids = np.concatenate([none, *(np.arange(count, dtype=np.int32) for count in counts)])
    return {TYPE: np.repeat(np.arange(len(counts), dtype=np.int32), counts), ID: ids}


def _types(of: str, field: str, features: Mapping[str, jax.Array], count: int) -> np.ndarray:
    """Returns the type of each row, int64 [rows]."""
    if field not in features:
        raise ValueError(f"{of} must have a feature {field!r} with their types")
    return known_ids(f"{of}[{field!r}]", features[field], count, "types").astype(np.int64)


def _taken(features: Mapping[str, ArrayLike], ids: np.ndarray, field: str) -> dict[str, np.ndarray]:
    """Returns the features of some rows, without their types but with their ids."""
    rows = {name: np.asarray(array)[ids] for name, array in features.items() if name != field}
    return {**rows, ID: ids.astype(np.int32)}
