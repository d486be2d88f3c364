"""Mini-batches of edges: their ends, negatives, and the neighbors of all these, without the edges themselves."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import HostEdges
from jmp_train.graphs.sampling.sampled_layer import Layer, LayerSizes
from jmp_train.graphs.sampling.sampler import MiniBatch, NeighborSampler, neighbor_sampler, with_measured_sizes
from jmp_train.graphs.structure import as_count, checked_ends, filled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeMiniBatch:
    """What a model needs to know of some edges and their negatives; arrays in the host's memory, padded.

    The ends of edges are places among the rows that the last layer returns. Padding edges have the ends 0.

    Attributes:
      blocks: a block for each layer, the first layer's first.
      inputs: int32 [sources of the first layer], the nodes whose features the first layer reads, -1 for padding.
      seeds: int32 [most ends], the nodes that the last layer's rows are of, -1 for padding.
      edge_ids: int32 [batch size], which edges these are, -1 for padding.
      senders: int32 [batch size], the row of the node that each edge leaves.
      receivers: int32 [batch size], the row of the node that each edge enters.
      negative_receivers: int32 [batch size, negatives], rows of nodes that stand for receivers which are none.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 0], 3, keep_edge_ids=True)
      >>> sampler = edge_sampler(edges, (2,), [0, 1, 2], [1, 2, 0], batch_size=2, negatives=1)
      >>> batch = sampler.sample([2], np.random.default_rng(0))
      >>> batch.seeds[batch.senders[0]], batch.seeds[batch.receivers[0]], batch.edge_ids.tolist()
      (np.int32(2), np.int32(0), [2, -1])
    """

    blocks: tuple[Any, ...]
    inputs: Any
    seeds: Any
    edge_ids: Any
    senders: Any
    receivers: Any
    negative_receivers: Any


@dataclasses.dataclass(frozen=True)
class EdgeSampler:
    """Draws mini-batches of edges; make it with `edge_sampler`.

    `jmp_train.data.neighbor_batches` takes it, with ids of edges in place of seeds.

    Attributes:
      neighbors: draws the neighbors of the edges' ends.
      ends: int32 [edges], senders and receivers of all edges.
      batch_size: the largest number of edges.
      negatives: how many negatives each edge gets.
      excluded: int64 [edges, ...], the edges that no message may take, where each edge is in a batch; -1 for none.
        None where all may.
      sizes: of the layers, for each shape that batches may have, the smallest first.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 0], 3, keep_edge_ids=True)
      >>> edge_sampler(edges, (2, 2), [0, 1, 2], [1, 2, 0], batch_size=2).batch_size
      2
    """

    neighbors: NeighborSampler
    ends: tuple[np.ndarray, np.ndarray]
    batch_size: int
    negatives: int
    excluded: np.ndarray | None
    sizes: tuple[tuple[LayerSizes, ...], ...]

    def sample(self, edge_ids: Ids, random: np.random.Generator) -> EdgeMiniBatch:
        """Returns the mini-batch of some edges.

        Args:
          edge_ids: int [at most the batch size], which edges.
          random: numpy's generator; the same one gives the same batch.

        Raises:
          ValueError: there are too many edges, or an id is out of range or no integer.
        """
        return self.sample_several([edge_ids], random)[0]

    def sample_several(self, parts: Sequence[Any], random: np.random.Generator) -> list[EdgeMiniBatch]:
        """Returns the mini-batches of several lists of edges, all of one shape, as a `stack` of them needs.

        Args:
          parts: of each the edges, see `sample`.
          random: see `sample`.

        Raises:
          ValueError: see `sample`.
        """
        parts = [self._checked(ids) for ids in parts]
        found = [self._ends(ids, random) for ids in parts]
        sampler = dataclasses.replace(self.neighbors, sizes=self.sizes)
        excluded = None
        if self.excluded is not None:
            excluded = [np.unique(self.excluded[ids]) for ids in parts]
        batches = sampler.sample_several([nodes for nodes, _ in found], random, excluded=excluded)
        return [self._batch(*each) for each in zip(batches, parts, (places for _, places in found), strict=True)]

    def layers_on_trial(self, random: np.random.Generator) -> list[Layer]:
        """Returns the layers, without padding, of a batch of edges drawn by chance.

        Args:
          random: numpy's generator.
        """
        count = len(self.ends[0])
        ids = random.choice(count, min(self.batch_size, count), replace=False)
        excluded = None if self.excluded is None else np.unique(self.excluded[ids])
        return self.neighbors.layers(self._ends(ids, random)[0], random, excluded)

    def _checked(self, edge_ids: Ids) -> np.ndarray:
        ids, count = np.asarray(edge_ids), len(self.ends[0])
        ids = ids if ids.size else ids.astype(np.int32)  # an empty list is float64
        if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
            raise ValueError(f"edge_ids must be integers [edges], got {ids.dtype} {ids.shape}")
        if len(ids) and not 0 <= ids.min() <= ids.max() < count:
            raise ValueError(f"edge_ids must be between 0 and {count - 1}, got {ids.min()} to {ids.max()}")
        if len(ids) > self.batch_size:
            raise ValueError(f"edge_ids must be at most {self.batch_size} edges, the batch size, got {len(ids)}")
        return ids

    def _ends(self, edge_ids: np.ndarray, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Returns the nodes at the ends of edges and negatives, each once, and the place of each end."""
        num_nodes = next(iter(self.neighbors.edges.values())).num_targets
        negatives = random.integers(0, max(num_nodes, 1), len(edge_ids) * self.negatives)
        ends = np.concatenate([self.ends[0][edge_ids], self.ends[1][edge_ids], negatives])
        return np.unique(ends, return_inverse=True)

    def _batch(self, batch: MiniBatch, edge_ids: np.ndarray, places: np.ndarray) -> EdgeMiniBatch:
        count, size = len(edge_ids), self.batch_size
        senders, receivers, negatives = places[:count], places[count : 2 * count], places[2 * count :]
        return EdgeMiniBatch(
            batch.blocks,
            batch.inputs,
            batch.seeds,
            filled(edge_ids, size, -1),
            filled(senders, size, 0),
            filled(receivers, size, 0),
            filled(negatives, size * self.negatives, 0).reshape(size, self.negatives),
        )


def edge_sampler(
    edges: HostEdges,
    fanouts: Sequence[int],
    senders: Ids,
    receivers: Ids,
    batch_size: int,
    *,
    negatives: int = 0,
    exclude: str | None = "self",
    reverse_ids: Ids | None = None,
    replace: bool = False,
    num_trials: int = 16,
) -> EdgeSampler:
    """Returns a sampler of edges with the neighbors of their ends.

    A model that is to tell whether an edge is there must not see it: of the neighbors that are drawn, those along an
    edge of the batch are left out, and with "reverse" those along its reverse too.

    Args:
      edges: of a graph of one type, along which messages pass, made with `keep_edge_ids=True`.
      fanouts: see `neighbor_sampler`.
      senders: int [edges], the node that each edge leaves, in the order that `host_edges` was given.
      receivers: int [edges], the node that each edge enters.
      batch_size: how many edges a batch has.
      negatives: how many negatives each edge gets, its sender with nodes drawn uniformly.
      exclude: "self", "reverse", or None: no edge is left out.
      reverse_ids: int [edges], the reverse of each edge, or -1; for "reverse". `reverse_edge_ids` finds them.
      replace: see `neighbor_sampler`.
      num_trials: how many batches of edges are drawn on trial, with their negatives, to measure the sizes of layers.

    Returns:
      The sampler.

    Raises:
      TypeError: a number or ids are not integers.
      ValueError: see `neighbor_sampler`; or `exclude` is another word or `reverse_ids` do not fit it, edges were made
        without their ids, or their numbers differ.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 0], 3, keep_edge_ids=True)
      >>> sampler = edge_sampler(edges, (-1,), [0, 1, 2], [1, 2, 0], batch_size=1)
      >>> batch = sampler.sample([0], np.random.default_rng(0))  # 0 to 1
      >>> batch.blocks[0].in_degrees[batch.receivers].tolist()  # nobody else sends to 1
      [0]

    Reference: as_edge_prediction_sampler of Deep Graph Library, https://www.dgl.ai.
    """
    if not isinstance(edges, HostEdges):
        raise TypeError(f"edges must be what host_edges returned, of one type, got {type(edges).__name__}")
    count = edges.num_sources
    ends = checked_ends(senders, receivers, count, edges.num_targets)
    if len(ends[0]) != edges.num_edges:
        raise ValueError(f"senders has {len(ends[0])} edges, where edges have {edges.num_edges}")
    if edges.edge_ids is None:
        raise ValueError("edges must be made with keep_edge_ids=True, so that those of a batch can be left out")
    size, num_negatives = as_count("batch_size", batch_size), as_count("negatives", negatives)
    excluded = _excluded(exclude, reverse_ids, len(ends[0]))
    most_ends = min(size * (2 + num_negatives), max(count, 1))
    nodes = np.concatenate([*ends, np.arange(count)]) if num_negatives else np.concatenate(ends)
    trials = as_count("num_trials", num_trials)
    neighbors = neighbor_sampler(edges, fanouts, nodes, most_ends, replace=replace, num_trials=min(trials, 1))
    of_edges = (ends[0].astype(np.int32), ends[1].astype(np.int32))
    sampler = EdgeSampler(neighbors, of_edges, size, num_negatives, excluded, neighbors.sizes)
    tried = (sampler.layers_on_trial(np.random.default_rng(trial)) for trial in range(trials))
    return dataclasses.replace(sampler, sizes=with_measured_sizes(neighbors, tried, neighbors.sizes[-1]).sizes)


def _excluded(exclude: str | None, reverse_ids: Ids | None, count: int) -> np.ndarray | None:
    if exclude not in ("self", "reverse", None):
        raise ValueError(f"exclude={exclude!r} must be 'self', 'reverse' or None")
    if (exclude == "reverse") != (reverse_ids is not None):
        raise ValueError("reverse_ids are for exclude='reverse', and it needs them: reverse_edge_ids finds them")
    own = np.arange(count)
    if reverse_ids is None:
        return None if exclude is None else own
    reverse = np.asarray(reverse_ids)
    if reverse.shape != own.shape or not np.issubdtype(reverse.dtype, np.integer):
        raise ValueError(f"reverse_ids must be integers [{count}], got {reverse.dtype} {reverse.shape}")
    if count and not -1 <= reverse.min() <= reverse.max() < count:
        raise ValueError(f"reverse_ids must be between -1 and {count - 1}, got {reverse.min()} to {reverse.max()}")
    return np.stack([own, reverse], axis=1)
