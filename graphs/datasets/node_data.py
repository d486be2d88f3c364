"""`NodeData`, a data set of node classification in the host's memory: graph, features, labels, split."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class NodeData:
    """A graph whose nodes are to be classified, as it came from files; nothing of it is on a device.

    Attributes:
      senders: int32 [edges], the node that each edge leaves.
      receivers: int32 [edges], the node that each edge enters.
      features: float32 [nodes, width].
      labels: int32 [nodes], the class of each node; -1 where it is not known.
      num_classes: how many classes there are.
      train: int32 [nodes to train on], which these are.
      validation: int32 [nodes to choose a model by].
      test: int32 [nodes to test it on].
      nodes: what else is known of nodes, arrays [nodes, ...] by name.
      edges: what is known of edges, arrays [edges, ...] by name.

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
        """How many nodes there are."""
        return len(self.labels)

    @property
    def num_edges(self) -> int:
        """How many edges there are; one in both directions counts twice."""
        return len(self.senders)
