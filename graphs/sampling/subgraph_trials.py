"""Draws of GraphSAINT's subgraphs, and how often nodes and edges are in them."""

import dataclasses
import warnings
from typing import Literal

import numpy as np

from jmp_train.graphs.sampling.host_edge_index import ALL, HostEdges, sample_in_edges
from jmp_train.graphs.sampling.walks import random_walk
from jmp_train.graphs.structure import places_of

Mode = Literal["node", "edge", "walk"]
MODES: tuple[Mode, ...] = ("node", "edge", "walk")
LEAST_TRIALS, COVERAGE, MISSED, MOST_READS = 100, 50, 0.01, 500_000_000  # see `saint_sampler`


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
