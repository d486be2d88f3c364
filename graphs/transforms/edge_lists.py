"""Edges in the host's memory: read from a graph, chosen by ids, transformed, and converted to a graph again."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import (
    NOT_APART,
    Adjacency,
    Graph,
    check_formats,
    check_known,
    checked_ends,
    checked_features,
    formats_made,
    known_ids,
    make_adjacency_checked,
    on_device,
)

ID = "_ID"  # the feature with original ids, like DGL's NID and EID


@dataclasses.dataclass(frozen=True)
class EdgeList:
    """Edges with their features.

    Attributes:
      senders: int [edges], the node that each edge leaves.
      receivers: int [edges], the node that each edge enters.
      features: arrays [edges, ...] by name.
    """

    senders: np.ndarray
    receivers: np.ndarray
    features: Mapping[str, np.ndarray]

    @property
    def is_self_loop(self) -> np.ndarray:
        """Bool [edges], whether an edge leaves and enters the same node."""
        return self.senders == self.receivers

    @property
    def keys(self) -> np.ndarray:
        """Int64 [edges], ascending with the receiver, then the sender; equal for parallel edges."""
        return self.receivers.astype(np.int64) * (1 + int(self.senders.max(initial=0))) + self.senders

    def take(self, places: np.ndarray) -> "EdgeList":
        """Returns some of the edges.

        Args:
          places: int [some edges], or bool [edges].
        """
        features = {name: rows[places] for name, rows in self.features.items()}
        return EdgeList(self.senders[places], self.receivers[places], features)


def edges_on_host(graph: Graph) -> EdgeList:
    """Returns the edges of a graph in their order, or sorted by receiver if the graph stores no order.

    Args:
      graph: an unpadded Graph with values.

    Raises:
      TypeError: the argument is not a Graph, or is traced.
      ValueError: the graph is padded, or has an id out of range, which is possible if it was made under jit.
    """
    if not isinstance(graph, Graph):
        kind = type(graph).__name__
        raise TypeError(f"graph must be a Graph or a GraphsTuple, got {kind}")
    check_known("graph", graph, "transforms run outside of jit")
    if graph.is_padded:
        raise ValueError("graph is padded: unpad it first")
    if graph.kept_nodes is not None:
        raise ValueError("graph has dropped nodes: transform it before dropping")
    features = {name: np.asarray(rows) for name, rows in graph.edges.items()}
    ends = ends_on_host(graph.connections)
    return EdgeList(*checked_ends(*ends, graph.num_nodes, graph.num_nodes), features)


def with_edge_list(graph: Graph, edges: EdgeList, formats: Sequence[str] | None) -> Graph:
    """Returns the graph with these edges in place of its own; the edges of each graph of a batch are put together.

    Args:
      graph: a graph.
      edges: the new edges, between its nodes.
      formats: see `from_edges`; None for the graph's formats.

    Raises:
      TypeError: `formats` is not a sequence.
      ValueError: a format is unknown, or does not support edge features; or an edge connects two graphs of
        the batch, or `n_node` does not add up, as is possible in a graph created under jit.
    """
    return with_parts(graph, graph.nodes, owning_graphs(graph), edges, formats)


def with_parts(
    graph: Graph,
    nodes: Mapping[str, ArrayLike],
    owners: np.ndarray,
    edges: EdgeList,
    formats: Sequence[str] | None,
) -> Graph:
    """Returns the graph with these nodes and edges in place of its own; see `with_edge_list`.

    Args:
      graph: a graph.
      nodes: features of the new nodes, by name.
      owners: int [nodes], ascending, the graph of the batch to which each node belongs.
      edges: the new edges, between these nodes.
      formats: see `from_edges`; None for the graph's formats.
    """
    formats = formats_of(graph, formats)
    check_formats(formats)
    n_edge = np.array([len(edges.senders)])
    if len(graph.n_node) != 1:
        owner = owners[edges.receivers]
        _check_apart(owners[edges.senders], owner)
        n_edge = np.bincount(owner, minlength=len(graph.n_node))
        if (owner[1:] < owner[:-1]).any():
            edges = edges.take(np.argsort(owner, kind="stable"))
    count = len(owners)
    adjacency = make_adjacency_checked(edges.senders, edges.receivers, count, count, formats=formats)
    rows = adjacency.receivers.num_edges if edges.features else adjacency.num_edges
    return dataclasses.replace(
        graph,
        nodes=checked_features("nodes", nodes, count),
        edges=checked_features("edges", edges.features, rows),
        connections=adjacency,
        n_node=on_device(np.bincount(owners, minlength=len(graph.n_node)), np.int32),
        n_edge=on_device(n_edge, np.int32),
    )


def check_keeps_edges(adjacency: Adjacency, what: object = "graph") -> None:
    """Raises ValueError if an adjacency does not store single edges, so that none can be named."""
    if adjacency.ends is None:
        raise ValueError(NOT_APART.replace("the graph", str(what), 1))


def formats_of(graph: Graph, formats: Sequence[str] | None) -> Sequence[str]:
    """Returns the given formats, or the graph's if none are given."""
    return formats_made(graph.connections) if formats is None else formats


def owning_graphs(graph: Graph) -> np.ndarray:
    """Returns the graph of the batch to which each node belongs, int [nodes]."""
    owners = np.repeat(np.arange(len(graph.n_node)), np.asarray(graph.n_node))
    if len(owners) != graph.num_nodes:
        raise ValueError(f"n_node adds up to {len(owners)}, but there are {graph.num_nodes}")
    return owners


def ends_on_host(adjacency: Adjacency) -> tuple[np.ndarray, np.ndarray]:
    """Returns the senders and the receivers of edges, int32; sorted by receiver if no order is stored."""
    if adjacency.ends is not None:
        return np.asarray(adjacency.senders.ids), np.asarray(adjacency.receivers.ids)
    assert adjacency.neighbors is not None  # every format has one or the other
    by_target = adjacency.neighbors.by_target
    nodes = np.arange(by_target.num_nodes, dtype=np.int32)
    return np.asarray(by_target.others), np.repeat(nodes, np.asarray(by_target.degrees))


def _check_apart(of_senders: np.ndarray, of_receivers: np.ndarray) -> None:
    differ = of_senders != of_receivers
    if differ.any():
        edge = int(differ.argmax())
        raise ValueError(
            f"graph: an edge connects two graphs of the batch, {of_senders[edge]} and {of_receivers[edge]}"
        )


def chosen_ids(name: str, ids: Ids, count: int, *, distinct: bool = True) -> np.ndarray:
    """Returns checked ids of nodes or edges, int64 [chosen].

    Args:
      name: the argument's name, for messages.
      ids: int [chosen], or bool [count]; one integer stands for a list of it.
      count: number of nodes or edges.
      distinct: True to refuse repeated ids.

    Raises:
      TypeError: they are neither integers nor booleans, or traced.
      ValueError: they have the wrong shape, are out of range, or are repeated; the message names the id.

    Example:
      >>> chosen_ids("nodes", [2, 0], 3), chosen_ids("nodes", np.array([True, False, True]), 3)
      (array([2, 0]), array([0, 2]))
    """
    check_known(name, ids, "transforms run outside of jit")
    array = np.atleast_1d(np.asarray(ids))
    if array.dtype == np.bool_:
        if array.shape != (count,):
            raise ValueError(f"{name} must be a mask of shape ({count},), got shape {array.shape}")
        return np.flatnonzero(array)
    array = known_ids(name, array, count, name.partition("[")[0]).astype(np.int64)
    if distinct and len(array) > 1:
        order = np.argsort(array, kind="stable")
        again = np.flatnonzero(array[order[1:]] == array[order[:-1]])
        if len(again):
            place = int(order[again[0] + 1])
            raise ValueError(f"{name}[{place}] = {array[place]} occurs twice")
    return array


def mask_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns bool [count], True for the given ids.

    Args:
      ids: int [some], in range.
      count: number of possible ids.

    Example:
      >>> mask_of(np.array([2, 0]), 3).tolist()
      [True, False, True]
    """
    mask = np.full(count, False)
    mask[ids] = True
    return mask


def as_they_come(ids: np.ndarray) -> np.ndarray:
    """Returns each id once, in the order of first occurrence."""
    return ids[np.sort(np.unique(ids, return_index=True)[1])]
