"""Random walks on edges in the host's memory, many at a time: uniform ones, along metapaths, and node2vec's.

Pairs of nodes that are near each other on walks are mini-batches of one shape.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.sampling.host_edge_index import HostEdges
from jmp_train.graphs.structure import EdgeType, as_count, filled, find_edge_type, known_ids


def random_walk(
    edges: HostEdges | Mapping[EdgeType, HostEdges],
    nodes: Ids,
    random: np.random.Generator,
    *,
    length: int | None = None,
    metapath: Sequence[str | EdgeType] | None = None,
    restart_prob: float = 0.0,
) -> np.ndarray:
    """Returns random walks along the edges, each step along one of those that leave a node, drawn uniformly.

    Args:
      edges: the edges of one type; of several for a metapath.
      nodes: int [walks], the node at which each walk starts.
      random: NumPy's generator; the same one gives the same walks.
      length: number of steps.
      metapath: in place of a length, the edge type of each step, or its name.
      restart_prob: the probability that a walk ends before a step, so that several walks from a node are one walk
        with restarts.

    Returns:
      Int32 [walks, steps + 1], the nodes of each walk; -1 after its end, which is also at a node without a further
      edge. A start of -1 is a walk without nodes.

    Raises:
      TypeError: a number or the nodes are not integers.
      ValueError: a node, a number or a probability is out of range, neither or both of `length` and `metapath` are
        given, or the types of the metapath are unknown or do not follow each other.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 2], [1, 2, 3], 4)
      >>> random_walk(edges, [0, 2], np.random.default_rng(0), length=2).tolist()
      [[0, 1, 2], [2, 3, -1]]

    Reference: dgl.sampling.random_walk of Deep Graph Library, https://www.dgl.ai.
    """
    if not 0 <= restart_prob <= 1:
        raise ValueError(f"restart_prob={restart_prob} must be between 0 and 1")
    if (length is None) == (metapath is None):
        raise ValueError("either length or metapath is needed, and not both")
    steps = _steps(edges, length) if metapath is None else _metapath(edges, metapath)
    count = edges.num_sources if isinstance(edges, HostEdges) else steps[0].num_targets if steps else 2**31
    walks = _begun(nodes, count, len(steps))
    for place, leaving in enumerate(steps):
        now = walks[:, place]
        if restart_prob:
            now = np.where(random.random(len(now)) < restart_prob, -1, now)
        walks[:, place + 1] = uniform_step(leaving, now, random)
    return walks


def node2vec_walk(
    edges: HostEdges, nodes: Ids, length: int, random: np.random.Generator, *, p: float = 1.0, q: float = 1.0
) -> np.ndarray:
    """Returns node2vec's walks: a step depends on the node before, and is a uniform one for p = q = 1.

    From a node that the walk entered from t, an edge to t has the weight 1 / p, to a node to which t sends 1, and to
    any other one 1 / q. Time grows with the ratio of the largest weight to the others.

    Args:
      edges: the edges of one type.
      nodes: int [walks], the node at which each walk starts.
      length: number of steps.
      random: NumPy's generator; the same one gives the same walks.
      p: the return parameter; large values keep a walk from going back.
      q: the in-out parameter; large values keep a walk near its start, small ones send it away.

    Returns:
      Int32 [walks, length + 1], see `random_walk`.

    Raises:
      TypeError: the length or the nodes are not integers.
      ValueError: a node or a number is out of range.

    Example:
      >>> from jmp_train.graphs import host_edges
      >>> edges = host_edges([0, 1, 1, 2], [1, 0, 2, 1], 3)
      >>> node2vec_walk(edges, [0], 3, np.random.default_rng(0), p=1e6).tolist()
      [[0, 1, 2, 1]]

    Reference: Grover and Leskovec, node2vec, https://arxiv.org/abs/1607.00653.
    """
    for name, number in (("p", p), ("q", q)):
        if not 0 < number < np.inf:
            raise ValueError(f"{name}={number} must be positive and finite")
    steps = _steps(edges, length)
    walks = _begun(nodes, edges.num_sources, len(steps))
    for place, leaving in enumerate(steps):
        if place == 0 or p == q == 1:
            walks[:, place + 1] = uniform_step(leaving, walks[:, place], random)
        else:
            walks[:, place + 1] = _second_step(edges, walks[:, place - 1], walks[:, place], 1 / p, 1 / q, random)
    return walks


def uniform_step(leaving: HostEdges, now: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Returns the ends of edges drawn uniformly from those of each node, int32 [walks]; -1 without an edge.

    Args:
      leaving: the edges by the node that they leave, see `HostEdges.leaving`.
      now: int [walks], the nodes; -1 for none.
      random: NumPy's generator.
    """
    if leaving.num_edges == 0:
        return np.full(len(now), -1, np.int32)
    starts = leaving.starts[now]  # of -1, that of the end
    degrees = leaving.starts[np.minimum(now + 1, leaving.num_targets)] - starts
    places = starts + (random.random(len(now)) * degrees).astype(np.int64)
    is_walking = (now >= 0) & (degrees > 0)
    return np.where(is_walking, leaving.sources[np.where(is_walking, places, 0)], -1)


def _second_step(
    edges: HostEdges, before: np.ndarray, now: np.ndarray, back: float, away: float, random: np.random.Generator
) -> np.ndarray:
    """Returns a step of each walk, drawn in proportion to weights by rejection of uniform ones.

    Args:
      edges: the edges.
      before: int [walks], the nodes before.
      now: int [walks], the nodes; -1 for none.
      back: the weight of edges to the node before.
      away: the weight of edges to nodes to which the node before does not send.
      random: NumPy's generator.
    """
    found = np.full(len(now), -1, np.int32)
    largest, (least, most) = max(back, away, 1.0), sorted((away, 1.0))
    left = np.flatnonzero(now >= 0)
    while len(left):
        drawn = uniform_step(edges.leaving, now[left], random)
        level = random.random(len(left)) * largest
        is_back = drawn == before[left]
        is_taken = level < np.where(is_back, back, least)
        unknown = np.flatnonzero(~is_back & (level >= least) & (level < most))  # it depends on whether there is an edge
        is_near = edges.has_edges(before[left[unknown]], drawn[unknown])
        is_taken[unknown] = is_near == (away < 1)
        is_taken |= drawn < 0
        found[left[is_taken]] = drawn[is_taken]
        left = left[~is_taken]
    return found


def _steps(edges: HostEdges | Mapping[EdgeType, HostEdges], length: int | None) -> list[HostEdges]:
    """Returns the edges of each step, by the node that they leave."""
    if not isinstance(edges, HostEdges):
        raise TypeError(f"edges must be a result of host_edges, got {type(edges).__name__}; a metapath takes several")
    if edges.num_sources != edges.num_targets:
        raise ValueError(f"edges from {edges.num_sources} to {edges.num_targets} nodes need a metapath")
    return [edges.leaving] * as_count("length", 0 if length is None else length)


def _metapath(edges: HostEdges | Mapping[EdgeType, HostEdges], metapath: Sequence[str | EdgeType]) -> list[HostEdges]:
    """Returns the edges of each step of a metapath, by the node that they leave."""
    if not isinstance(edges, Mapping):
        raise TypeError("edges must be a mapping from edge types to results of host_edges for a metapath")
    kinds = [find_edge_type(kind, edges) for kind in metapath]
    for place, (kind, following) in enumerate(itertools.pairwise(kinds)):
        if kind[2] != following[0]:
            raise ValueError(f"metapath[{place + 1}] = {following} does not leave {kind[2]!r}, which {kind} enters")
    return [edges[kind].leaving for kind in kinds]


def _begun(nodes: Ids, count: int, steps: int) -> np.ndarray:
    """Returns walks with checked starts and no further nodes, int32 [walks, steps + 1]."""
    array = known_ids("nodes", np.atleast_1d(nodes), count, least=-1)
    walks = np.empty((len(array), steps + 1), np.int32)
    walks[:, 0] = array
    return walks


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
