"""`LinkData`, a data set for link prediction in the host's memory: a graph, and links that it may have."""

import dataclasses
from collections.abc import Mapping

import numpy as np


def _none() -> np.ndarray:
    return np.empty(0, np.int32)


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
