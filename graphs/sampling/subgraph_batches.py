"""GraphSAINT: mini-batches that are subgraphs of random nodes, edges or walks, with factors that remove their bias."""

import dataclasses
import warnings
from collections.abc import Sequence
from typing import Any, Literal

import jax
import numpy as np
from flax.core import FrozenDict

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import ALL, HostEdges, sample_in_edges
from jmp_train.graphs.sampling.sampled_layer import EDGE, LayerSizes, padding_buckets
from jmp_train.graphs.sampling.walks import random_walk
from jmp_train.graphs.structure import (
    Graph,
    as_count,
    checked_features,
    checked_word,
    filled,
    formats_of_size,
    make_adjacency_checked,
    on_device,
    places_of,
)

Mode = Literal["node", "edge", "walk"]
MODES: tuple[Mode, ...] = ("node", "edge", "walk")
LEAST_TRIALS, COVERAGE, MISSED, MOST_READS = 100, 50, 0.01, 500_000_000  # see `saint_sampler`


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


@dataclasses.dataclass
class SubgraphTrials:
    """Counts over trial batches: how many had each node and edge, and the largest numbers of nodes and edges."""

    nodes: np.ndarray
    edges: np.ndarray
    number: int = 0
    most_nodes: int = 0
    most_edges: int = 0

    def add(self, nodes: np.ndarray, edges: np.ndarray) -> None:
        """Counts the nodes and edges of a batch."""
        self.nodes[nodes] += 1
        self.edges[edges] += 1
        self.number += 1
        self.most_nodes, self.most_edges = max(self.most_nodes, len(nodes)), max(self.most_edges, len(edges))

    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the shares of batches in which nodes are, and edges.

        1 more in both counts makes an inverse share unbiased, except for nodes and edges that no trial had.
        """
        return (self.nodes + 1) / (self.number + 1), (self.edges + 1) / (self.number + 1)

    @property
    def missed(self) -> float:
        """The fraction of the edges that no trial had."""
        return float((self.edges == 0).mean()) if len(self.edges) else 0.0


def tried(
    edges: HostEdges,
    mode: Mode,
    weight_sums: np.ndarray,
    length: int,
    batch_size: int,
    number: int | None,
    random: np.random.Generator,
) -> SubgraphTrials:
    """Returns the results of trial batches; see `saint_sampler`."""
    count, degrees, reads = edges.num_sources, edges.in_degrees, 0
    trials = SubgraphTrials(np.zeros(count), np.zeros(edges.num_edges))

    def are_enough() -> bool:
        if number is not None:
            return trials.number >= number
        if trials.number == 0 or trials.number % LEAST_TRIALS:
            return False
        covers = trials.nodes.sum() >= COVERAGE * count and trials.missed <= MISSED
        return mode == "node" or covers or reads >= MOST_READS

    while not are_enough():
        seeds = random.permutation(count)[:batch_size] if mode == "walk" else np.zeros(batch_size, int)
        nodes, places, _ = subgraph(edges, drawn(edges, mode, weight_sums, length, seeds, random))
        trials.add(nodes, places)
        reads += int(degrees[nodes].sum())
    if number is None and mode != "node" and trials.missed > MISSED:
        warnings.warn(
            f"{trials.missed:.0%} of the edges were in none of {trials.number} trial batches, so sums of messages come "
            f"out up to {trials.missed:.0%} too small on average: pass num_trials for more",
            stacklevel=3,
        )
    return trials


def shares_of_nodes(edges: HostEdges, weights: np.ndarray, draws: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the probabilities that nodes, and both ends of edges, are among nodes drawn in proportion to weights."""
    of_node = weights / weights.sum()
    of_nodes = 1 - (1 - of_node) ** draws
    senders, receivers = edges.sources, edges.receivers
    neither = np.maximum(1 - of_node[senders] - of_node[receivers], 0) ** draws
    both = of_nodes[senders] + of_nodes[receivers] - (1 - neither)
    return of_nodes, np.where(senders == receivers, of_nodes[senders], both)


def subgraph(edges: HostEdges, nodes: np.ndarray) -> tuple[np.ndarray, np.ndarray, tuple[np.ndarray, np.ndarray]]:
    """Returns the different ones of some nodes, and all edges between them.

    Args:
      edges: the edges of the whole graph.
      nodes: int [nodes], ids, possibly repeated.

    Returns:
      The nodes, ascending; the places of the edges in `edges.sources`; and the ends of these edges, as places of the
      nodes.
    """
    nodes = np.flatnonzero(np.bincount(nodes, minlength=edges.num_sources))
    names = places_of(nodes, edges.num_sources)
    receivers, places = sample_in_edges(edges, nodes, ALL, np.random.default_rng(0))
    senders = names[edges.sources[places]]
    is_kept = senders >= 0
    return nodes, places[is_kept], (senders[is_kept], receivers[is_kept])


def weights_of(edges: HostEdges, mode: Mode) -> np.ndarray:
    """Returns the weights with which nodes, or edges, are drawn."""
    if mode == "node":
        return np.maximum(edges.out_degrees, 1)
    if mode == "walk":
        return np.empty(0)
    of_senders, of_receivers = (1 / np.maximum(degrees, 1) for degrees in (edges.in_degrees, edges.out_degrees))
    return of_senders[edges.sources] + np.repeat(of_receivers, edges.in_degrees)


def drawn(
    edges: HostEdges, mode: Mode, ends: np.ndarray, length: int, seeds: np.ndarray, random: np.random.Generator
) -> np.ndarray:
    """Returns the nodes of a batch, some of them repeated.

    Args:
      edges: the edges of the whole graph.
      mode: the kind of drawing.
      ends: the running sums of the weights.
      length: number of steps of a walk.
      seeds: see `SaintSampler.sample`.
      random: NumPy's generator.
    """
    if mode == "walk":
        walks = random_walk(edges, seeds, random, length=length)
        return walks[walks >= 0]
    places = np.searchsorted(ends, random.random(len(seeds)) * ends[-1], side="right").clip(max=len(ends) - 1)
    if mode == "node":
        return places
    return np.concatenate([edges.sources[places], np.searchsorted(edges.starts, places, side="right") - 1])
