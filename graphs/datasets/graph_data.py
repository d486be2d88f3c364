"""`GraphData`, a data set of many graphs with labels, in the host's memory."""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import SupportsIndex

import numpy as np

from jmp_train.graphs.structure import Graph, from_edges


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
