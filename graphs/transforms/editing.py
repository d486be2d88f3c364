"""Adds edges to a graph, removes edges, and renumbers nodes; on the host, as pure functions."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, cast

import jax.numpy as jnp
import jraph
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import (
    AnyGraph,
    Graph,
    accepts_jraph,
    check_rows,
    checked_ends,
    checked_features,
    checked_word,
    from_jraph,
    places_of,
    to_jraph,
)
from jmp_train.graphs.transforms.edge_lists import (
    ID,
    EdgeList,
    check_keeps_edges,
    chosen_ids,
    edges_on_host,
    owning_graphs,
    with_edge_list,
)
from jmp_train.graphs.transforms.edges import rounded


@accepts_jraph
def add_edges(
    graph: Graph,
    senders: Ids,
    receivers: Ids,
    edges: Mapping[str, ArrayLike | Sequence[float]] | None = None,
    *,
    formats: Sequence[str] | None = None,
) -> Graph:
    """Returns the graph with further edges, after its own; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      senders: int [new edges], the node that each new edge leaves; no nodes are added.
      receivers: int [new edges], the node that each new edge enters.
      edges: features of the new edges, arrays [new edges, ...] by name. Features that are missing here or on
        the existing edges are 0. An existing feature keeps its dtype.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph; in a batch, the edges of each graph are put together.

    Raises:
      TypeError: the graph or ids are traced, or ids are not integers.
      ValueError: the graph is padded; an id is out of range; a feature has another shape than on the existing
        edges, or values that their dtype cannot represent; or an edge connects two graphs of a batch.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = add_edges(from_edges([0], [1], 3, edges={"w": [0.5]}), [1, 2], [2, 0], {"w": [2.0, 4.0]})
      >>> graph.senders.tolist(), graph.receivers.tolist(), graph.edges["w"].tolist()
      ([0, 1, 2], [1, 2, 0], [0.5, 2.0, 4.0])

    Reference: add_edges of Deep Graph Library, https://www.dgl.ai.
    """
    old = edges_on_host(graph)
    new = checked_ends(senders, receivers, graph.num_nodes, graph.num_nodes)
    given = {name: np.asarray(rows) for name, rows in (edges or {}).items()}
    features = {}
    for name in [*old.features, *(name for name in given if name not in old.features)]:
        rows = old.features.get(name)
        features[name] = _joined(name, rows, len(old.senders), given.get(name), len(new[0]))
    senders, receivers = np.append(old.senders, new[0]), np.append(old.receivers, new[1])
    return with_edge_list(graph, EdgeList(senders, receivers, features), formats)


@accepts_jraph
def remove_edges(graph: Graph, edges: Ids, store_ids: bool = False, *, formats: Sequence[str] | None = None) -> Graph:
    """Returns the graph without some of its edges; runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      edges: int [removed], ids of the edges to remove, or bool [edges].
      store_ids: True to store the other edges' ids in `graph` as the feature "_ID", int32.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with its other edges in their order and all of its nodes.

    Raises:
      TypeError: the graph or ids are traced, or ids are neither integers nor booleans.
      ValueError: the graph is padded, or does not store single edges; or an id is out of range.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = remove_edges(from_edges([0, 1, 2], [1, 2, 0], 3), [1], store_ids=True)
      >>> graph.senders.tolist(), graph.edges["_ID"].tolist()
      ([0, 2], [0, 2])

    Reference: remove_edges of Deep Graph Library, https://www.dgl.ai.
    """
    old = edges_on_host(graph)
    check_keeps_edges(graph.connections)
    is_kept = np.full(len(old.senders), True)
    is_kept[chosen_ids("edges", edges, len(is_kept), distinct=False)] = False
    kept = old.take(is_kept)
    if store_ids:
        ids = np.flatnonzero(is_kept).astype(np.int32)
        kept = dataclasses.replace(kept, features={**kept.features, ID: ids})
    return with_edge_list(graph, kept, formats)


def _joined(name: str, old: np.ndarray | None, num_old: int, new: np.ndarray | None, num_new: int) -> np.ndarray:
    """Returns the rows of old edges and then of new ones; 0 for edges without the feature."""
    if new is not None:
        check_rows(f"edges[{name!r}]", new.shape, num_new, "new edges")
    if old is None:
        assert new is not None  # each name belongs to old edges or to new ones
        return np.concatenate([np.zeros((num_old, *new.shape[1:]), new.dtype), new])
    if new is None:
        return np.concatenate([old, np.zeros((num_new, *old.shape[1:]), old.dtype)])
    if new.shape[1:] != old.shape[1:]:
        raise ValueError(f"edges[{name!r}] must have rows of shape {old.shape[1:]}, got {new.shape[1:]}")
    return np.concatenate([old, _cast(name, new, old.dtype)])


def _cast(name: str, rows: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Returns the rows in the dtype of existing ones; raises ValueError if it cannot represent them."""
    if rows.dtype == dtype:
        return rows
    what = f"edges[{name!r}]"
    cast = rounded(what, rows, dtype)
    if jnp.issubdtype(dtype, jnp.inexact) and (lost := np.isinf(cast) & ~np.isinf(rows)).any():
        raise ValueError(f"{what} is {np.extract(lost, rows)[0]}, which does not fit into {dtype}")
    return cast


def reorder(
    graph: AnyGraph, by: str = "degree", *, formats: Sequence[str] | None = None
) -> tuple[AnyGraph, np.ndarray]:
    """Returns the graph with its nodes renumbered and its edges sorted, and the old id of each node.

    Edges are sorted by receiver, and those of a receiver by sender, so that rows read one after the
    other are close together. Nodes of a batch stay in their graph. Runs on the host.

    Args:
      graph: a graph of ours or jraph's, or a batch, without padding.
      by: "degree" for the in-degree, the largest first, with equal ones in their old order; "rcm" for the
        reverse Cuthill-McKee order, in which neighbors have close ids.
      formats: see `from_edges`; None for the graph's formats.

    Returns:
      The graph, with the features of its nodes and edges; and `order`, int32 [nodes], the old id of each
      new node. For labels and masks, `new = old[order]`; for results on the new nodes,
      `old = new[np.argsort(order)]`; lists of nodes become `np.argsort(order)[nodes]`.

    Raises:
      TypeError: the graph is traced, or has several types.
      ValueError: the graph is padded, or `by` is unknown.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 0], [2, 2, 1], 3, nodes={"h": [10.0, 11.0, 12.0]})
      >>> new, order = reorder(graph)
      >>> order.tolist(), new.nodes["h"].tolist()
      ([2, 1, 0], [12.0, 11.0, 10.0])
      >>> new.senders.tolist(), new.receivers.tolist()
      ([1, 2, 2], [0, 0, 1])

    Reference: Cuthill and McKee, Reducing the bandwidth of sparse symmetric matrices, 1969.
    """
    checked_word("by", by, _ORDERS)
    if isinstance(graph, jraph.GraphsTuple):
        ours, order = _reordered(from_jraph(graph), by, formats)
        return cast(AnyGraph, to_jraph(ours)), order
    return _reordered(graph, by, formats)


def _reordered(graph: Any, by: str, formats: Sequence[str] | None) -> tuple[Any, np.ndarray]:
    edges = edges_on_host(graph)
    order = _ORDERS[by](edges, graph.num_nodes)
    owners = owning_graphs(graph)[order]
    order = order[np.argsort(owners, kind="stable")].astype(np.int32)
    names = places_of(order, len(order))
    edges = EdgeList(names[edges.senders], names[edges.receivers], edges.features)
    edges = edges.take(np.argsort(edges.keys, kind="stable"))
    nodes = {name: np.asarray(rows)[order] for name, rows in graph.nodes.items()}
    graph = dataclasses.replace(graph, nodes=checked_features("nodes", nodes, len(order)))
    return with_edge_list(graph, edges, formats), order


def _by_degree(edges: EdgeList, num_nodes: int) -> np.ndarray:
    return np.argsort(-np.bincount(edges.receivers, minlength=num_nodes), kind="stable")


def _by_reverse_cuthill_mckee(edges: EdgeList, num_nodes: int) -> np.ndarray:
    import scipy.sparse
    import scipy.sparse.csgraph

    if num_nodes == 0:  # scipy would take the maximum of no degrees
        return np.arange(0)
    entries = np.ones(len(edges.senders), bool), (edges.receivers, edges.senders)
    matrix = scipy.sparse.csr_array(entries, shape=(num_nodes, num_nodes))
    symmetric = (matrix + matrix.T).tocsr()
    return scipy.sparse.csgraph.reverse_cuthill_mckee(symmetric, symmetric_mode=True)


_ORDERS = {"degree": _by_degree, "rcm": _by_reverse_cuthill_mckee}
