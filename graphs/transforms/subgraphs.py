"""Parts of a graph: some nodes, some edges, the edges of some nodes, and neighborhoods of several hops; on the host.

Nodes and edges keep their order, or take the caller's, and store their ids in the whole graph
as the feature "_ID".

Reference: dgl.subgraph of Deep Graph Library, https://www.dgl.ai.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import (
    AnyBatch,
    AnyGraph,
    EdgeType,
    Graph,
    HeteroGraph,
    accepts_jraph,
    as_count,
    batch_of,
    places_of,
)
from jmp_train.graphs.transforms.edge_lists import (
    ID,
    EdgeList,
    as_they_come,
    check_keeps_edges,
    chosen_ids,
    edges_on_host,
    formats_of,
    mask_of,
    owning_graphs,
    with_parts,
)
from jmp_train.graphs.transforms.hetero_subgraphs import hetero_edge_subgraph, hetero_node_subgraph


@accepts_jraph
def node_subgraph(
    graph: Graph | HeteroGraph,
    nodes: Ids | Mapping[str, Ids],
    relabel_nodes: bool = True,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> Graph | HeteroGraph:
    """Returns the graph of some nodes and of all edges between them; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding; or one of several types.
      nodes: int [kept nodes], ids of the nodes, or bool [nodes]; by node type if there are several, none of a missing
        type.
      relabel_nodes: True to keep only these nodes, numbered in the order of `nodes`; False to keep all nodes.
      store_ids: True to store the ids of nodes and edges in `graph` as the feature "_ID" of both, int32; that of
        edges only if the graph has the format "coo".
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its edges in their order and the features of both. In a batch, the nodes of each graph are
      put together.

    Raises:
      TypeError: the graph or ids are traced, or ids are neither integers nor booleans.
      ValueError: the graph is padded; or an id is out of range, or repeated.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> part = node_subgraph(from_edges([0, 1, 2, 3, 4], [1, 2, 3, 4, 0], 5), [0, 1, 4])
      >>> part.senders.tolist(), part.receivers.tolist(), part.edges["_ID"].tolist(), part.nodes["_ID"].tolist()
      ([0, 2], [1, 0], [0, 4], [0, 1, 4])
    """
    if isinstance(graph, HeteroGraph):
        return hetero_node_subgraph(graph, cast(Mapping[str, Ids], nodes), relabel_nodes, store_ids, formats=formats)
    edges = edges_on_host(graph)
    ids = chosen_ids("nodes", cast(Ids, nodes), graph.num_nodes)
    kept = _between(edges, mask_of(ids, graph.num_nodes))
    return _part(graph, edges, kept, ids if relabel_nodes else None, store_ids, formats)


@accepts_jraph
def edge_subgraph(
    graph: Graph | HeteroGraph,
    edges: Ids | Mapping[str | EdgeType, Ids],
    relabel_nodes: bool = True,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> Graph | HeteroGraph:
    """Returns the graph of some edges and of the nodes at their ends; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding; or one of several types.
      edges: int [kept edges], ids of the edges, or bool [edges]; by edge type, or its name, if there are several, none
        of a missing type.
      relabel_nodes: True to keep only the nodes at their ends, in the order of occurrence, the senders first; False to
        keep all nodes.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its edges in the order of `edges` and the features of both. In a batch, the nodes and edges of
      each graph are put together.

    Raises:
      TypeError: the graph or ids are traced, or ids are neither integers nor booleans.
      ValueError: the graph is padded, or does not store single edges; or an id is out of range, or repeated.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> part = edge_subgraph(from_edges([0, 1, 2, 3, 4], [1, 2, 3, 4, 0], 5), [0, 4])
      >>> part.senders.tolist(), part.receivers.tolist(), part.edges["_ID"].tolist(), part.nodes["_ID"].tolist()
      ([0, 1], [2, 0], [0, 4], [0, 4, 1])
    """
    if isinstance(graph, HeteroGraph):
        by_type = cast(Mapping[str | EdgeType, Ids], edges)
        return hetero_edge_subgraph(graph, by_type, relabel_nodes, store_ids, formats=formats)
    whole = edges_on_host(graph)
    check_keeps_edges(graph.connections)
    kept = chosen_ids("edges", cast(Ids, edges), len(whole.senders))
    nodes = as_they_come(np.concatenate([whole.senders[kept], whole.receivers[kept]]))
    return _part(graph, whole, kept, nodes if relabel_nodes else None, store_ids, formats)


@accepts_jraph
def in_subgraph(
    graph: Graph,
    nodes: Ids,
    relabel_nodes: bool = False,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns the graph of all edges that enter some nodes; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      nodes: int [entered nodes], ids of the nodes, or bool [nodes].
      relabel_nodes: True to keep only the nodes at the edges' ends, see `edge_subgraph`; False to keep all nodes.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its edges in their order and the features of both.

    Raises:
      TypeError: see `node_subgraph`.
      ValueError: see `node_subgraph`.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> part = in_subgraph(from_edges([0, 1, 2, 3, 4], [1, 2, 3, 4, 0], 5), [2, 0])
      >>> part.senders.tolist(), part.receivers.tolist(), part.num_nodes
      ([1, 4], [2, 0], 5)
    """
    edges = edges_on_host(graph)
    return _touching(graph, edges, edges.receivers, nodes, relabel_nodes, store_ids, formats)


@accepts_jraph
def out_subgraph(
    graph: Graph,
    nodes: Ids,
    relabel_nodes: bool = False,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns the graph of all edges that leave some nodes; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      nodes: int [left nodes], ids of the nodes, or bool [nodes].
      relabel_nodes: see `in_subgraph`.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its edges in their order and the features of both.

    Raises:
      TypeError: see `node_subgraph`.
      ValueError: see `node_subgraph`.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> out_subgraph(from_edges([0, 1, 2], [1, 2, 0], 3), [2], relabel_nodes=True).nodes["_ID"].tolist()
      [2, 0]
    """
    edges = edges_on_host(graph)
    return _touching(graph, edges, edges.senders, nodes, relabel_nodes, store_ids, formats)


def khop_in_subgraph(
    graph: AnyGraph,
    nodes: Ids,
    k: int,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> tuple[AnyGraph, np.ndarray]:
    """Returns the graph of all nodes from which some nodes are reached in `k` hops, and the new ids of the latter.

    It has all edges between these nodes. Runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      nodes: int [seeds], ids of the reached nodes, or bool [nodes].
      k: largest number of hops.
      relabel_nodes: True to keep only the nodes found, numbered in their order; False to keep all
        nodes.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, and the ids of `nodes` in it, int64 [seeds].

    Raises:
      TypeError: see `node_subgraph`; or `k` is not an integer.
      ValueError: see `node_subgraph`; or `k` is negative.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> part, seeds = khop_in_subgraph(from_edges([0, 1, 2, 3], [1, 2, 3, 4], 5), [3], 2)
      >>> part.nodes["_ID"].tolist(), part.senders.tolist(), part.receivers.tolist(), seeds.tolist()
      ([1, 2, 3], [0, 1], [1, 2], [2])
    """
    return _within_hops(graph, nodes, k, relabel_nodes, store_ids, formats, is_in=True)


def khop_out_subgraph(
    graph: AnyGraph,
    nodes: Ids,
    k: int,
    relabel_nodes: bool = True,
    store_ids: bool = True,
    *,
    formats: Sequence[str] | None = None,
) -> tuple[AnyGraph, np.ndarray]:
    """Returns the graph of all nodes that are reached from some nodes in `k` hops, and the new ids of the latter.

    It has all edges between these nodes. Runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      nodes: int [seeds], ids of the start nodes, or bool [nodes].
      k: largest number of hops.
      relabel_nodes: see `khop_in_subgraph`.
      store_ids: see `node_subgraph`.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, and the ids of `nodes` in it, int64 [seeds].

    Raises:
      TypeError: see `khop_in_subgraph`.
      ValueError: see `khop_in_subgraph`.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> part, seeds = khop_out_subgraph(from_edges([0, 1, 2, 3], [1, 2, 3, 4], 5), [3], 2)
      >>> part.nodes["_ID"].tolist(), seeds.tolist()
      ([3, 4], [0])
    """
    return _within_hops(graph, nodes, k, relabel_nodes, store_ids, formats, is_in=False)


def _touching(
    graph: Graph,
    edges: EdgeList,
    ends: np.ndarray,
    nodes: Ids,
    relabel_nodes: bool,
    store_ids: bool,
    formats: Sequence[str] | None,
) -> Graph:
    is_touched = mask_of(chosen_ids("nodes", nodes, graph.num_nodes), graph.num_nodes)
    kept = np.flatnonzero(is_touched[ends])
    found = as_they_come(np.concatenate([edges.senders[kept], edges.receivers[kept]]))
    return _part(graph, edges, kept, found if relabel_nodes else None, store_ids, formats)


def _within_hops(
    graph: AnyGraph,
    nodes: Ids,
    k: int,
    relabel_nodes: bool,
    store_ids: bool,
    formats: Sequence[str] | None,
    *,
    is_in: bool,
) -> tuple[AnyGraph, np.ndarray]:
    as_count("k", k)
    ours = batch_of(cast(AnyBatch, graph))
    edges = edges_on_host(ours)
    seeds = chosen_ids("nodes", nodes, ours.num_nodes, distinct=False)
    ends = (edges.receivers, edges.senders) if is_in else (edges.senders, edges.receivers)
    is_reached = _reached(*ends, mask_of(seeds, ours.num_nodes), k)
    found, kept = np.flatnonzero(is_reached), _between(edges, is_reached)
    part = accepts_jraph(_part)(graph, edges, kept, found if relabel_nodes else None, store_ids, formats)
    return part, np.searchsorted(found, seeds) if relabel_nodes else seeds


def _reached(near: np.ndarray, far: np.ndarray, is_seed: np.ndarray, k: int) -> np.ndarray:
    """Returns bool [nodes], True for nodes reached in at most k steps from an edge's near end to its far one."""
    is_reached = is_seed.copy()
    for _ in range(k):
        more = far[is_reached[near]]
        if is_reached[more].all():
            break
        is_reached[more] = True
    return is_reached


def _between(edges: EdgeList, is_kept: np.ndarray) -> np.ndarray:
    """Returns the places of the edges with both ends kept."""
    return np.flatnonzero(is_kept[edges.senders] & is_kept[edges.receivers])


def _part(
    graph: Graph,
    edges: EdgeList,
    kept: np.ndarray,
    nodes: np.ndarray | None,
    store_ids: bool,
    formats: Sequence[str] | None,
) -> Graph:
    """Returns the graph of some edges, and of some nodes, or all nodes if `nodes` is None."""
    taken, owners = edges.take(kept), owning_graphs(graph)
    ids = np.arange(graph.num_nodes) if nodes is None else nodes[np.argsort(owners[nodes], kind="stable")]
    names = places_of(ids, graph.num_nodes)
    features, rows = dict(taken.features), {name: np.asarray(array)[ids] for name, array in graph.nodes.items()}
    if store_ids:
        rows[ID] = ids.astype(np.int32)
        if set(formats_of(graph, formats)) != {"csr"}:
            features[ID] = kept.astype(np.int32)
    taken = EdgeList(names[taken.senders], names[taken.receivers], features)
    return with_parts(graph, rows, owners[ids], taken, formats)
