"""Renumbers a graph's nodes, so that those used together are close together in memory."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jraph
import numpy as np

from jmp_train.graphs.structure import AnyGraph, checked_features, from_jraph, to_jraph
from jmp_train.graphs.transforms.edge_lists import (
    EdgeList,
    edges_on_host,
    owning_graphs,
    with_edge_list,
)


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
    if not isinstance(by, str) or by not in _ORDERS:
        raise ValueError(f"by={by!r} must be one of {', '.join(_ORDERS)}")
    if isinstance(graph, jraph.GraphsTuple):
        ours, order = _reordered(from_jraph(graph), by, formats)
        return cast(AnyGraph, to_jraph(ours)), order
    return _reordered(graph, by, formats)


def _reordered(graph: Any, by: str, formats: Sequence[str] | None) -> tuple[Any, np.ndarray]:
    edges = edges_on_host(graph)
    order = _ORDERS[by](edges, graph.num_nodes)
    owners = owning_graphs(graph)[order]
    order = order[np.argsort(owners, kind="stable")].astype(np.int32)
    names = np.empty_like(order)
    names[order] = np.arange(len(order), dtype=order.dtype)
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
