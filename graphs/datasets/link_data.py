"""`LinkData`, a data set of link prediction in the host's memory: a graph, and links that it may or may not have."""

import dataclasses
from collections.abc import Mapping

import numpy as np


def _none() -> np.ndarray:
    return np.empty(0, np.int32)


@dataclasses.dataclass(frozen=True)
class Links:
    """Links that are there, and pairs of nodes that are not linked, to tell them from.

    Attributes:
      senders: int32 [links], the node that each link leaves.
      receivers: int32 [links], the node that each enters.
      negative_senders: int32 [negatives]; or [links, 1] where each link has negatives of its own.
      negative_receivers: int32 [negatives], the other node of each pair; or [links, negatives of each].
      values: what else is known of the links, arrays [links, ...] by name.

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
        """Returns how many links there are."""
        return len(self.senders)


@dataclasses.dataclass(frozen=True)
class LinkData:
    """A graph whose missing links are to be found, as it came from files; nothing of it is on a device.

    Attributes:
      senders: int32 [edges], the node that each edge of the graph leaves, along which messages pass.
      receivers: int32 [edges], the node that each edge enters.
      num_nodes: how many nodes there are.
      train: the links to train on.
      validation: the links to choose a model by.
      test: the links to test it on.
      nodes: what is known of nodes, arrays [nodes, ...] by name.
      edges: what is known of edges, arrays [edges, ...] by name.

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
        """How many edges the graph has; one in both directions counts twice."""
        return len(self.senders)
