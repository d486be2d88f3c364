"""Data sets in the host's memory: `NodeData`, `LinkData` and, of many graphs, `GraphData`."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex

import numpy as np

from jmp_train.graphs.structure import Graph, from_edges


@dataclasses.dataclass(frozen=True)
class NodeData:
    """A graph from files whose nodes are to be classified; nothing is on a device.

    Attributes:
      senders: int32 [edges], the node that each edge leaves.
      receivers: int32 [edges], the node that each edge enters.
      features: float32 [nodes, width].
      labels: int32 [nodes], the class of each node; -1 if unknown.
      num_classes: number of classes.
      train: int32 [training nodes], their ids.
      validation: int32 [validation nodes], their ids.
      test: int32 [test nodes], their ids.
      nodes: further features of nodes, arrays [nodes, ...] by name.
      edges: features of edges, arrays [edges, ...] by name.

    Example:
      >>> ends = np.array([[0, 1], [1, 0]], np.int32)
      >>> ids = np.arange(3, dtype=np.int32)
      >>> data = NodeData(*ends, np.ones((3, 4), np.float32), ids, 3, ids[:1], ids[1:2], ids[2:])
      >>> data.num_nodes, data.num_edges
      (3, 2)
    """

    senders: np.ndarray
    receivers: np.ndarray
    features: np.ndarray
    labels: np.ndarray
    num_classes: int
    train: np.ndarray
    validation: np.ndarray
    test: np.ndarray
    nodes: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    edges: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.labels)

    @property
    def num_edges(self) -> int:
        """Number of edges; an edge in both directions counts twice."""
        return len(self.senders)


def _none() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True)
class GraphData:
    """Many graphs from files, one after the other; nothing is on a device.

    Attributes:
      n_node: int32 [graphs], number of nodes of each graph.
      n_edge: int32 [graphs], number of edges of each graph.
      senders: int32 [edges of all], the node that each edge leaves, counted from 0 in its graph.
      receivers: int32 [edges of all], the node that each edge enters, counted from 0 in its graph.
      labels: int32 [graphs], the class of each graph; or float32 [graphs, tasks], NaN if unknown.
      num_classes: number of classes; None if labels are numbers.
      nodes: features of nodes, arrays [nodes of all, ...] by name.
      edges: features of edges, arrays [edges of all, ...] by name.
      graphs: further features of graphs, arrays [graphs, ...] by name.
      train: int32 [training graphs], their indices; empty if the files have no split.
      validation: int32 [validation graphs], as `train`.
      test: int32 [test graphs], as `train`.

    Example:
      >>> import numpy as np
      >>> counts, ends = np.array([2, 1], np.int32), np.array([0, 1, 0], np.int32)
      >>> data = GraphData(counts, np.array([2, 1], np.int32), ends, ends, np.array([1, 0], np.int32), 2)
      >>> len(data), data.graph(1).num_nodes, data.graph(1).senders.tolist()
      (2, 1, [0])
    """

    n_node: np.ndarray
    n_edge: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    labels: np.ndarray
    num_classes: int | None
    nodes: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    edges: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    graphs: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    train: np.ndarray = dataclasses.field(default_factory=_none)
    validation: np.ndarray = dataclasses.field(default_factory=_none)
    test: np.ndarray = dataclasses.field(default_factory=_none)

    def __len__(self) -> int:
        """Returns the number of graphs."""
        return len(self.n_node)

    @functools.cached_property
    def node_starts(self) -> np.ndarray:
        """Int64 [graphs + 1], the start of each graph's nodes, and the end of the last ones."""
        return np.append(0, np.cumsum(self.n_node, dtype=np.int64))

    @functools.cached_property
    def edge_starts(self) -> np.ndarray:
        """Int64 [graphs + 1], the start of each graph's edges, and the end of the last ones."""
        return np.append(0, np.cumsum(self.n_edge, dtype=np.int64))

    def graph(self, place: SupportsIndex, *, formats: Sequence[str] = ("coo",)) -> Graph:
        """Returns one of the graphs with the features of its nodes and edges, on the default device.

        Args:
          place: index of the graph, from 0.
          formats: see `from_edges`.

        Raises:
          IndexError: there is no such graph.
        """
        place = operator.index(place)
        if not 0 <= place < len(self):
            raise IndexError(f"place={place} must be from 0 to {len(self) - 1}")
        nodes, edges = (slice(*starts[place : place + 2]) for starts in (self.node_starts, self.edge_starts))
        return from_edges(
            self.senders[edges],
            self.receivers[edges],
            int(self.n_node[place]),
            {name: rows[nodes] for name, rows in self.nodes.items()},
            {name: rows[edges] for name, rows in self.edges.items()},
            formats=formats,
        )


@dataclasses.dataclass(frozen=True)
class Links:
    """Existing links, and pairs of nodes without a link.

    Attributes:
      senders: int32 [links], the node that each link leaves.
      receivers: int32 [links], the node that each link enters.
      negative_senders: int32 [negatives]; or [links, 1] if each link has its own negatives.
      negative_receivers: int32 [negatives], the other node of each pair; or [links, negatives of each].
      values: further features of the links, arrays [links, ...] by name.

    Example:
      >>> links = Links(np.array([0, 2], np.int32), np.array([1, 0], np.int32))
      >>> len(links), links.negative_senders.shape
      (2, (0,))
    """

    senders: np.ndarray
    receivers: np.ndarray
    negative_senders: np.ndarray = dataclasses.field(default_factory=_none)
    negative_receivers: np.ndarray = dataclasses.field(default_factory=_none)
    values: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        """Returns the number of links."""
        return len(self.senders)


@dataclasses.dataclass(frozen=True)
class LinkData:
    """A graph from files whose missing links are to be predicted; nothing is on a device.

    Attributes:
      senders: int32 [edges], the node that each edge of the graph leaves; messages use these edges.
      receivers: int32 [edges], the node that each edge enters.
      num_nodes: number of nodes.
      train: the training links.
      validation: the validation links.
      test: the test links.
      nodes: features of nodes, arrays [nodes, ...] by name.
      edges: features of edges, arrays [edges, ...] by name.

    Example:
      >>> ends = np.array([[0, 1], [1, 0]], np.int32)
      >>> links = Links(*ends)
      >>> data = LinkData(*ends, 3, links, links, links)
      >>> data.num_edges, len(data.test)
      (2, 2)
    """

    senders: np.ndarray
    receivers: np.ndarray
    num_nodes: int
    train: Links
    validation: Links
    test: Links
    nodes: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    edges: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def num_edges(self) -> int:
        """Number of edges of the graph; an edge in both directions counts twice."""
        return len(self.senders)
