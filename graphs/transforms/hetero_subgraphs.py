"""Parts of a graph of several types: of some nodes or some edges of each type; on the host.

Reference: dgl.node_subgraph and dgl.edge_subgraph of Deep Graph Library, https://www.dgl.ai.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import (
    DEFAULT_FORMATS,
    EdgeType,
    HeteroGraph,
    check_known,
    formats_made,
    hetero_from_edges,
    places_of,
)
from jmp_train.graphs.transforms.edge_lists import (
    ID,
    as_they_come,
    check_keeps_edges,
    chosen_ids,
    ends_on_host,
    mask_of,
)

Ends = Mapping[EdgeType, tuple[np.ndarray, np.ndarray]]


def hetero_node_subgraph(
    graph: HeteroGraph,
    nodes: Mapping[str, Ids],
    relabel_nodes: bool = True,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> HeteroGraph:
    """Returns the graph of some nodes of each type and of all edges between them; `node_subgraph` calls it.

    Args:
      graph: a graph of several types.
      nodes: by node type, the nodes to keep; none of a missing type.
      relabel_nodes: see `node_subgraph`.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Raises:
      TypeError: see `node_subgraph`; or `nodes` is not a mapping by type.
      ValueError: see `node_subgraph`; or there is no such type.

    Example:
      >>> graph = hetero_from_edges({("user", "plays", "game"): ([0, 1, 2], [1, 0, 1])}, {"user": 3, "game": 2})
      >>> part = hetero_node_subgraph(graph, {"user": [2, 0], "game": [1]})
      >>> part.senders("plays").tolist(), part.receivers("plays").tolist(), part.nodes["user"]["_ID"].tolist()
      ([1, 0], [0, 0], [2, 0])
    """
    ends = _ends_by_type(graph, "nodes", nodes)
    for kind in nodes:
        graph.num_nodes(kind)  # raises an error that lists the types if there is no such type
    ids = {kind: chosen_ids(f"nodes[{kind!r}]", nodes.get(kind, ()), count) for kind, count in graph.n_node}
    is_kept = {kind: mask_of(ids[kind], count) for kind, count in graph.n_node}
    kept = {
        kind: np.flatnonzero(is_kept[kind[0]][senders] & is_kept[kind[2]][receivers])
        for kind, (senders, receivers) in ends.items()
    }
    return _part(graph, ends, kept, ids if relabel_nodes else None, store_ids, formats)


def hetero_edge_subgraph(
    graph: HeteroGraph,
    edges: Mapping[str | EdgeType, Ids],
    relabel_nodes: bool = True,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> HeteroGraph:
    """Returns the graph of some edges of each type and of the nodes at their ends; `edge_subgraph` calls it.

    Args:
      graph: a graph of several types.
      edges: by edge type, or its name, the edges to keep; none of a missing type.
      relabel_nodes: see `edge_subgraph`.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Raises:
      TypeError: see `edge_subgraph`; or `edges` is not a mapping by type.
      ValueError: see `edge_subgraph`; or there is no such type.

    Example:
      >>> graph = hetero_from_edges({("user", "plays", "game"): ([0, 1, 2], [1, 0, 1])}, {"user": 3, "game": 2})
      >>> part = hetero_edge_subgraph(graph, {"plays": [2, 0]})
      >>> part.senders("plays").tolist(), part.nodes["user"]["_ID"].tolist(), part.num_nodes("game")
      ([0, 1], [2, 0], 1)
    """
    ends = _ends_by_type(graph, "edges", edges)
    chosen = {graph.edge_type(kind): ids for kind, ids in edges.items()}
    if len(chosen) < len(edges):
        raise ValueError(f"edges has a type twice: {list(edges)}")
    for kind in chosen:
        check_keeps_edges(graph.connections[kind], kind)
    kept = {
        kind: chosen_ids(f"edges[{kind!r}]", chosen.get(kind, ()), len(senders)) for kind, (senders, _) in ends.items()
    }
    touched: dict[str, list[np.ndarray]] = {kind: [np.empty(0, np.int64)] for kind in graph.node_types}
    for kind, places in kept.items():
        for end, ids in zip((kind[0], kind[2]), ends[kind], strict=True):
            touched[end].append(ids[places])
    nodes = {kind: as_they_come(np.concatenate(parts)) for kind, parts in touched.items()}
    return _part(graph, ends, kept, nodes if relabel_nodes else None, store_ids, formats)


def _ends_by_type(graph: HeteroGraph, name: str, chosen: object) -> Ends:
    check_known("graph", graph, "transforms run outside of jit")
    if not isinstance(chosen, Mapping):
        raise TypeError(
            f"{name} of a graph with several types must be a mapping from types, got {type(chosen).__name__}"
        )
    return {kind: ends_on_host(graph.connections[kind]) for kind in graph.edge_types}


def _part(
    graph: HeteroGraph,
    ends: Ends,
    kept: Mapping[EdgeType, np.ndarray],
    nodes: Mapping[str, np.ndarray] | None,
    store_ids: bool,
    formats: Sequence[str] | None,
) -> HeteroGraph:
    """Returns the graph of some edges, and of some nodes, or all nodes if `nodes` is None."""
    if formats is None:
        formats = next((formats_made(adjacency) for adjacency in graph.connections.values()), DEFAULT_FORMATS)
    ids = {kind: np.arange(count) for kind, count in graph.n_node} if nodes is None else nodes
    names = {kind: places_of(ids[kind], count) for kind, count in graph.n_node}
    rows = {kind: _taken(graph.nodes[kind], chosen, store_ids) for kind, chosen in ids.items()}
    has_places = store_ids and set(formats) != {"csr"}
    of_edges = {kind: _taken(graph.edges[kind], places, has_places) for kind, places in kept.items()}
    features = {kind: rows for kind, rows in of_edges.items() if rows}  # without "coo" edges have no features
    parts = {
        kind: (names[kind[0]][senders[kept[kind]]], names[kind[2]][receivers[kept[kind]]])
        for kind, (senders, receivers) in ends.items()
    }
    return hetero_from_edges(
        parts, {kind: len(chosen) for kind, chosen in ids.items()}, rows, features, formats=formats
    )


def _taken(features: Mapping[str, object], ids: np.ndarray, store_ids: bool) -> dict[str, np.ndarray]:
    rows = {name: np.asarray(array)[ids] for name, array in features.items()}
    return {**rows, ID: ids.astype(np.int32)} if store_ids else rows
