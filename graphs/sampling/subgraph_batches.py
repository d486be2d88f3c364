"""GraphSAINT: mini-batches that are subgraphs of random nodes, edges or walks, with factors that remove their bias."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from flax.core import FrozenDict

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import HostEdges
from jmp_train.graphs.sampling.sampled_layer import EDGE, LayerSizes, padding_buckets
from jmp_train.graphs.sampling.subgraph_trials import (
    MODES,
    Mode,
    drawn,
    shares_of_nodes,
    subgraph,
    tried,
    weights_of,
)
from jmp_train.graphs.structure import (
    Graph,
    as_count,
    checked_features,
    checked_word,
    filled,
    formats_of_size,
    make_adjacency_checked,
    on_device,
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SubgraphBatch:
    """A subgraph with all edges between some nodes, padded, and its normalization.

    Attributes:
      graph: the padded graph, whose edge feature "norm", float32, is the factor of each edge's message.
      nodes: int32 [nodes], the id of each node in the whole graph, -1 for padding.
      node_norm: float32 [nodes], the factor of each node's loss, 0 for padding: the sum of losses times factors is an
        unbiased estimate of the mean loss of all nodes.
      edge_ids: int32 [edges], the id of each edge, -1 for padding; None if ids are not stored.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> sampler = saint_sampler(host_edges([0, 1, 2], [1, 2, 0], 3), "walk", batch_size=1, length=2)
      >>> batch = sampler.sample([0], np.random.default_rng(0))
      >>> sorted(batch.nodes[:3].tolist()), batch.graph.in_degrees[:4].tolist()
      ([0, 1, 2], [1, 1, 1, 0])
    """

    graph: Graph
    nodes: Any
    node_norm: Any
    edge_ids: Any


@dataclasses.dataclass(frozen=True)
class SaintSampler:
    """Draws subgraphs; create it with `saint_sampler`.

    `jmp_train.data.neighbor_batches` takes it, with all nodes as seeds.

    Attributes:
      edges: the edges of one type.
      mode: the kind of drawing.
      batch_size: number of draws per batch.
      length: number of steps of a walk.
      node_norm: float32 [nodes], see `SubgraphBatch`.
      edge_norm: float32 [edges], in the order of the edges by receiver.
      weight_sums: float64, running sums of the weights with which nodes or edges are drawn.
      sizes: numbers of nodes and edges for each shape that batches may have, the smallest first.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> saint_sampler(host_edges([0, 1], [1, 0], 2), "node", batch_size=1).mode
      'node'
    """

    edges: HostEdges
    mode: Mode
    batch_size: int
    length: int
    node_norm: np.ndarray
    edge_norm: np.ndarray
    weight_sums: np.ndarray
    sizes: tuple[tuple[int, int], ...] = ()

    def sample(self, seeds: Ids, random: np.random.Generator) -> SubgraphBatch:
        """Returns a subgraph.

        Args:
          seeds: int [at most the batch size], the nodes at which walks start. In other modes only their number counts,
            the number of nodes or edges that are drawn.
          random: NumPy's generator; the same one gives the same batch.

        Raises:
          ValueError: there are too many seeds, or one is out of range.
        """
        return self.sample_several([seeds], random)[0]

    def sample_several(self, parts: Sequence[Ids], random: np.random.Generator) -> list[SubgraphBatch]:
        """Returns several subgraphs, all of one shape, as for a `stack`.

        Args:
          parts: the seeds of each, see `sample`.
          random: see `sample`.

        Raises:
          ValueError: see `sample`.
        """
        for seeds in parts:
            if np.size(seeds) > self.batch_size:
                raise ValueError(f"seeds must be at most {self.batch_size}, the batch size, got {np.size(seeds)}")
        how = self.edges, self.mode, self.weight_sums, self.length
        found = [subgraph(self.edges, drawn(*how, np.atleast_1d(seeds), random)) for seeds in parts]
        needed = [max(len(each[i]) for each in found) for i in (0, 1)]
        size = next(size for size in self.sizes if size[0] > needed[0] and size[1] >= needed[1])
        return [self._batch(*each, *size) for each in found]

    def _batch(
        self, nodes: np.ndarray, places: np.ndarray, ends: tuple[np.ndarray, np.ndarray], n_node: int, n_edge: int
    ) -> SubgraphBatch:
        # Padding edges are between nodes out of range, so they do not count.
        senders, receivers = (filled(end, n_edge, n_node) for end in ends)
        formats = formats_of_size(n_edge)
        adjacency = make_adjacency_checked(senders, receivers, n_node, n_node, formats=formats, is_fixed=True)
        counts = np.array([[len(nodes), n_node - len(nodes)], [len(places), n_edge - len(places)]], np.int32)
        of_edges = checked_features("edges", {"norm": _zeros_after(self.edge_norm[places], n_edge)}, n_edge)
        n_nodes, n_edges = map(on_device, counts)
        graph = Graph(FrozenDict(), of_edges, adjacency, n_nodes, n_edges, is_padded=True)
        norm = _zeros_after(self.node_norm[nodes], n_node)
        ids = None if self.edges.edge_ids is None else filled(self.edges.edge_ids[places], n_edge, -1)
        return SubgraphBatch(graph, filled(nodes, n_node, -1), norm, ids)


def saint_sampler(
    edges: HostEdges, mode: str, *, batch_size: int, length: int = 2, num_trials: int | None = None, seed: int = 0
) -> SaintSampler:
    """Returns GraphSAINT's sampler of subgraphs, with the sizes and the normalization of its batches.

    A batch has the nodes that are drawn, and all edges between them. The probabilities that nodes and edges are in a
    batch decide their factors: a node that is in one of two batches has twice the factor of one that is in all of them.
    They are known in mode "node", and estimated from trial batches in the others. The estimates of the factors are
    unbiased, except for nodes and edges in no trial, whose factors are too small.

    Args:
      edges: the edges of one type.
      mode: "node" draws nodes in proportion to the number of edges that leave them, and at least 1; "edge" draws both
        ends of edges, in proportion to the sum of 1 / in-degree of the sender and 1 / out-degree of the receiver;
        "walk" takes the nodes of random walks.
      batch_size: number of nodes, edges or walks that are drawn per batch; nodes and edges with replacement.
      length: number of steps of a walk.
      num_trials: number of trial batches. None for 100, and in the modes "edge" and "walk" for more until a node is in
        50 of them on average and 99% of the edges are in one, or until they have read 500 million edges.
      seed: seed of the trial batches.

    Returns:
      The sampler.

    Raises:
      TypeError: a number is not an integer, or edges are of another type.
      ValueError: the mode is unknown, a number is 0 or negative, or there are no edges to draw.

    Warns:
      UserWarning: without `num_trials`, the trials ended before they had 99% of the edges; the message has the bias.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> sampler = saint_sampler(host_edges([0, 1, 2], [1, 2, 0], 3), "edge", batch_size=2)
      >>> sampler.sample([0, 0], np.random.default_rng(0)).node_norm.shape
      (4,)

    Reference: Zeng et al., GraphSAINT, https://arxiv.org/abs/1907.04931; PyTorch Geometric's GraphSAINTSampler and
    Deep Graph Library's SAINTSampler.
    """
    if not isinstance(edges, HostEdges):
        raise TypeError(f"edges must be a result of host_edges, got {type(edges).__name__}")
    known = checked_word("mode", mode, MODES)
    for name, number in (("batch_size", batch_size), ("length", length), ("num_trials", num_trials)):
        if number is not None:
            as_count(name, number, least=1)
    count = edges.num_sources
    if count == 0 or edges.num_targets != count or (mode == "edge" and edges.num_edges == 0):
        raise ValueError(f"edges must be between the same nodes, and some, got {edges.num_edges} of {count} nodes")
    weights = weights_of(edges, known)
    weight_sums = np.cumsum(weights, dtype=np.float64)
    trials = tried(edges, known, weight_sums, length, batch_size, num_trials, np.random.default_rng(seed))
    shares = shares_of_nodes(edges, weights, batch_size) if mode == "node" else trials.shares()
    node_norm, edge_norm = _inverse(shares[0]) / count, shares[0][edges.receivers] * _inverse(shares[1])
    needed, most = (
        LayerSizes({"node": nodes}, {EDGE: number}, {EDGE: 0})
        for nodes, number in ((trials.most_nodes + 1, trials.most_edges), (count + 1, edges.num_edges))
    )
    sizes = tuple((step[0].sources["node"], step[0].edges[EDGE]) for step in padding_buckets([needed], [most]))
    norms = node_norm.astype(np.float32), edge_norm.astype(np.float32)
    return SaintSampler(edges, known, batch_size, length, *norms, weight_sums, sizes)


def _inverse(shares: np.ndarray) -> np.ndarray:
    """Returns 1 divided by shares; 0 for nodes and edges that are in no batch."""
    return np.divide(1, shares, out=np.zeros_like(shares), where=shares > 1e-15)


def _zeros_after(rows: np.ndarray, count: int) -> np.ndarray:
    return np.pad(rows, (0, count - len(rows)))
