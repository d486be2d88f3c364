"""Pairs of nodes that are near each other on random walks, as mini-batches of one shape."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import HostEdges
from jmp_train.graphs.sampling.walks import node2vec_walk
from jmp_train.graphs.structure import as_count, filled


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SkipGramBatch:
    """Pairs of nodes of random walks, in the host's memory.

    Attributes:
      centers: int32 [pairs], -1 for padding.
      contexts: int32 [pairs], -1 for padding.

    Example:
      >>> SkipGramBatch(*skip_gram_pairs(np.array([[4, 7]]), 1)).contexts.tolist()
      [7, 4]
    """

    centers: Any
    contexts: Any


@dataclasses.dataclass(frozen=True)
class SkipGramSampler:
    """Draws walks and pairs of their nodes; create it with `skip_gram_sampler`.

    `jmp_train.data.neighbor_batches` takes it, with the nodes at which walks start as seeds.

    Attributes:
      edges: the edges of one type.
      batch_size: the largest number of walks.
      length: number of steps of a walk.
      window: see `skip_gram_pairs`.
      p: see `node2vec_walk`.
      q: see `node2vec_walk`.
      sizes: none, because all batches have the same size.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> skip_gram_sampler(host_edges([0, 1], [1, 0], 2), batch_size=4, length=3, window=1).batch_size
      4
    """

    edges: HostEdges
    batch_size: int
    length: int
    window: int
    p: float
    q: float
    sizes: tuple[()] = ()

    def sample(self, seeds: Ids, random: np.random.Generator) -> SkipGramBatch:
        """Returns the pairs of a walk from each of some nodes, all batches of the same shape.

        Args:
          seeds: int [at most the batch size], the nodes.
          random: NumPy's generator; the same one gives the same batch.

        Raises:
          ValueError: there are too many seeds, or one is out of range.
        """
        starts = np.atleast_1d(np.asarray(seeds))
        if len(starts) > self.batch_size:
            raise ValueError(f"seeds must be at most {self.batch_size} nodes, the batch size, got {len(starts)}")
        nodes = filled(starts, self.batch_size, -1)
        walks = node2vec_walk(self.edges, nodes, self.length, random, p=self.p, q=self.q)
        return SkipGramBatch(*skip_gram_pairs(walks, self.window))

    def sample_several(self, parts: Sequence[Ids], random: np.random.Generator) -> list[SkipGramBatch]:
        """Returns the batches of several lists of nodes.

        Args:
          parts: the seeds of each batch, see `sample`.
          random: see `sample`.
        """
        return [self.sample(seeds, random) for seeds in parts]


def skip_gram_sampler(
    edges: HostEdges, *, batch_size: int, length: int, window: int, p: float = 1.0, q: float = 1.0
) -> SkipGramSampler:
    """Returns a sampler of pairs of nodes that are near each other on random walks.

    Args:
      edges: the edges of one type.
      batch_size: number of walks per batch.
      length: number of steps of a walk.
      window: see `skip_gram_pairs`.
      p: see `node2vec_walk`.
      q: see `node2vec_walk`.

    Returns:
      The sampler.

    Raises:
      TypeError: a number is not an integer.
      ValueError: a number is out of range.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> sampler = skip_gram_sampler(host_edges([0, 1], [1, 0], 2), batch_size=2, length=2, window=1)
      >>> sampler.sample([0], np.random.default_rng(0)).centers.tolist()
      [0, 1, 1, 0, -1, -1, -1, -1]

    Reference: Perozzi et al., DeepWalk, https://arxiv.org/abs/1403.6652; PyTorch Geometric's Node2Vec.
    """
    for name, number in (("batch_size", batch_size), ("length", length), ("window", window)):
        as_count(name, number, least=1)
    node2vec_walk(edges, (), 0, np.random.default_rng(0), p=p, q=q)  # checks the edges and the numbers
    return SkipGramSampler(edges, batch_size, length, window, p, q)


def skip_gram_pairs(walks: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the pairs of nodes that are at most `window` steps apart on a walk, in both directions.

    Args:
      walks: int [walks, nodes], -1 after the end of a walk, as from `random_walk`.
      window: the largest number of steps between the two.

    Returns:
      The centers and the contexts, int32 [pairs], walk after walk; both -1 if a walk is too short. Their number
      depends only on the shape of the walks.

    Raises:
      TypeError: `window` is not an integer.
      ValueError: `window` is negative, or walks do not have two axes.

    Example:
      >>> centers, contexts = skip_gram_pairs(np.array([[4, 7, 9], [3, 5, -1]]), 1)
      >>> centers.tolist(), contexts.tolist()
      ([4, 7, 7, 9, 3, 5, -1, -1], [7, 4, 9, 7, 5, 3, -1, -1])
    """
    walks, window = np.asarray(walks), as_count("window", window)
    if walks.ndim != 2:
        raise ValueError(f"walks must have shape [walks, nodes], got shape {walks.shape}")
    places = np.arange(walks.shape[1])
    steps = np.abs(places[:, None] - places)
    centers, contexts = np.nonzero((steps > 0) & (steps <= window))
    pairs = np.stack([walks[:, centers], walks[:, contexts]]).reshape(2, -1).astype(np.int32)
    pairs[:, (pairs < 0).any(axis=0)] = -1
    return pairs[0], pairs[1]
