"""Graphs derived from a graph: its line graph, and the graph with a virtual node; on the host."""

from collections.abc import Sequence

import numpy as np

from jmp_train.graphs.sampling import take_rows
from jmp_train.graphs.structure import Graph, accepts_jraph, check_int32
from jmp_train.graphs.transforms.edge_lists import (
    EdgeList,
    check_keeps_edges,
    edges_on_host,
    owning_graphs,
    with_parts,
)


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

    Reference: line_graph of Deep Graph Library, https://www.dgl.ai.
    """
    edges = edges_on_host(graph)
    check_keeps_edges(graph)
    leaving = np.argsort(edges.senders, kind="stable")  # the edges by the node that they leave
    degrees = np.bincount(edges.senders, minlength=graph.num_nodes)
    counts = degrees[edges.receivers]
    total = int(counts.sum())
    check_int32("the line graph has", total, "edges")
    senders = np.repeat(np.arange(len(counts)), counts)
    first = (np.cumsum(degrees) - degrees)[edges.receivers] - (np.cumsum(counts) - counts)
    receivers = leaving[first[senders] + np.arange(total)]
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
