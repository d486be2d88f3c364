"""`NodeData`, a data set of node classification in the host's memory: graph, features, labels, split."""

import dataclasses
from collections.abc import Mapping

import numpy as np


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
