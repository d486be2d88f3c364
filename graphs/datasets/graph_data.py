"""`GraphData`, a data set of many graphs in the host's memory, of each of which something is to be predicted."""

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
    """Many graphs, as they came from files, one after the other; nothing of them is on a device.

    Attributes:
      n_node: int32 [graphs], the nodes of each graph.
      n_edge: int32 [graphs], the edges of each graph.
      senders: int32 [edges of all], the node that each edge leaves, counted from 0 in its graph.
      receivers: int32 [edges of all], the node that each edge enters, counted from 0 in its graph.
      labels: int32 [graphs], the class of each graph; or float32 [graphs, tasks], NaN where it is not known.
      num_classes: how many classes there are; None where labels are numbers.
      nodes: what is known of nodes, arrays [nodes of all, ...] by name.
      edges: what is known of edges, arrays [edges of all, ...] by name.
      graphs: what else is known of graphs, arrays [graphs, ...] by name.
      train: int32 [graphs to train on], which these are; empty where the files have no split.
      validation: int32 [graphs to choose a model by], as `train`.
      test: int32 [graphs to test it on], as `train`.

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
        """Returns how many graphs there are."""
        return len(self.n_node)

    @functools.cached_property
    def node_starts(self) -> np.ndarray:
        """Int64 [graphs + 1], where the nodes of each graph begin, and where the last ones end."""
        return np.append(0, np.cumsum(self.n_node, dtype=np.int64))

    @functools.cached_property
    def edge_starts(self) -> np.ndarray:
        """Int64 [graphs + 1], where the edges of each graph begin, and where the last ones end."""
        return np.append(0, np.cumsum(self.n_edge, dtype=np.int64))

    def graph(self, place: SupportsIndex, *, formats: Sequence[str] = ("coo",)) -> Graph:
        """Returns one of the graphs, with what is known of its nodes and edges, on the default device.

        Args:
          place: which graph, counted from 0.
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
