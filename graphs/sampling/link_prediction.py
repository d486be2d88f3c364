"""Link prediction: negatives, pairs of nodes that stand for edges that do not exist, and metrics of scores.

Negatives of a step are drawn under jit from a random key, or on the host from NumPy's generator. They always have the
same shapes, so fresh ones do not cause a retrace. Metrics are computed on the host, in float64.

References: dgl.dataloading.negative_sampler of Deep Graph Library, https://www.dgl.ai; Hu et al., Open Graph Benchmark,
https://arxiv.org/abs/2005.00687 (its evaluator of links).
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import as_count, as_int32_ids, checked_ends

Numbers = ArrayLike | Sequence[float] | Sequence[Sequence[float]]


def uniform_negatives(key: jax.Array, senders: Ids, num_nodes: int, k: int = 1) -> tuple[jax.Array, jax.Array]:
    """Returns `k` pairs for each edge: its sender, and a node drawn uniformly; under jit or not.

    A pair may be an edge or a self-loop by chance.

    Args:
      key: a random key; a fresh one gives fresh pairs.
      senders: int [edges], the node that each edge leaves.
      num_nodes: number of nodes to draw from.
      k: number of pairs per edge.

    Returns:
      The senders and the receivers, int32 [edges * k]; those of one edge are together.

    Raises:
      TypeError: a number, or an id, is not an integer.
      ValueError: a number is negative, or there are edges but no nodes.

    Example:
      >>> senders, receivers = uniform_negatives(jax.random.key(0), jnp.array([3, 1]), 5, k=2)
      >>> senders.tolist(), receivers.shape
      ([3, 3, 1, 1], (4,))
    """
    senders = jnp.repeat(as_int32_ids("senders", senders), as_count("k", k))
    if as_count("num_nodes", num_nodes) == 0 and senders.size:
        raise ValueError("num_nodes=0 leaves no nodes to sample")
    return senders, jax.random.randint(key, senders.shape, 0, max(num_nodes, 1), jnp.int32)


def in_batch_negatives(key: jax.Array, senders: Ids, receivers: Ids, k: int = 1) -> tuple[jax.Array, jax.Array]:
    """Returns `k` pairs for each edge of a batch: its sender, and the receivers of other edges; under jit or not.

    The rows of these nodes are in the batch already. Nodes are drawn in proportion to their in-degree in the batch.

    Args:
      key: a random key; a fresh one gives fresh pairs.
      senders: int [edges], the node that each edge leaves.
      receivers: int [edges], the node that each edge enters.
      k: number of pairs per edge, from `k` different other edges; less than the number of edges.

    Returns:
      The senders and the receivers, int32 [edges * k]; those of one edge are together.

    Raises:
      TypeError: `k`, or an id, is not an integer.
      ValueError: `k` is negative or too large.

    Example:
      >>> ends = jnp.array([0, 1, 2]), jnp.array([5, 6, 7])
      >>> senders, receivers = in_batch_negatives(jax.random.key(0), *ends, k=2)
      >>> senders.tolist(), [sorted(receivers[i : i + 2].tolist()) for i in (0, 2, 4)]
      ([0, 0, 1, 1, 2, 2], [[6, 7], [5, 7], [5, 6]])
    """
    senders, receivers = as_int32_ids("senders", senders), as_int32_ids("receivers", receivers)
    count = len(receivers)
    if as_count("k", k) and k >= count:
        raise ValueError(f"k={k} must be less than the {count} edges of the batch")
    shifts = 1 + jax.random.permutation(key, max(count - 1, 0))[:k]
    others = (jnp.arange(count)[:, None] + shifts) % max(count, 1)
    return jnp.repeat(senders, k), receivers[others.ravel()]


def global_negatives(
    random: np.random.Generator,
    senders: Ids,
    receivers: Ids,
    num_nodes: int,
    count: int,
    *,
    allow_self_loops: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """Returns distinct pairs of nodes drawn uniformly from those that are no edges of a graph; on the host.

    Args:
      random: NumPy's generator.
      senders: int [edges], the node that each edge of the graph leaves.
      receivers: int [edges], the node that each edge enters.
      num_nodes: number of nodes.
      count: number of pairs.
      allow_self_loops: True to allow pairs of a node with itself.

    Returns:
      The senders and the receivers, int32 [count].

    Raises:
      TypeError: ids or numbers are not integers, or are traced.
      ValueError: an id is out of range, a number is negative, or there are fewer such pairs.

    Example:
      >>> pairs = global_negatives(np.random.default_rng(0), [0, 1], [1, 2], 3, 4)
      >>> sorted(zip(*(ids.tolist() for ids in pairs)))
      [(0, 2), (1, 0), (2, 0), (2, 1)]
    """
    num_nodes, count = as_count("num_nodes", num_nodes), as_count("count", count)
    first, second = (ids.astype(np.int64) for ids in checked_ends(senders, receivers, num_nodes, num_nodes))
    taken = _keys(first, second, num_nodes)
    if not allow_self_loops:
        nodes = np.arange(num_nodes, dtype=np.int64)
        taken = np.concatenate([taken, _keys(nodes, nodes, num_nodes)])
    taken = np.unique(taken)
    free = num_nodes**2 - len(taken)
    if count > free:
        raise ValueError(f"count={count} must be at most the {free} pairs without an edge")
    # The free pair with index p comes after p free pairs and some taken ones.
    places = _distinct(random, free, count)
    before = taken - np.arange(len(taken))  # number of free pairs before each taken one
    keys = places + np.searchsorted(before, places, side="right")
    found = np.divmod(keys, max(num_nodes, 1))
    return found[0].astype(np.int32), found[1].astype(np.int32)


def reverse_edge_ids(senders: Ids, receivers: Ids, num_nodes: int) -> np.ndarray:
    """Returns the reverse of each edge, int64 [edges]; -1 if there is none; on the host.

    Parallel edges are matched in their order, the first with the first; a self-loop is its own reverse.

    Args:
      senders: int [edges], the node that each edge leaves.
      receivers: int [edges], the node that each edge enters.
      num_nodes: number of nodes.

    Raises:
      TypeError: ids are not integers, or are traced.
      ValueError: an id is out of range.

    Example:
      >>> reverse_edge_ids([0, 1, 2], [1, 0, 0], 3)
      array([ 1,  0, -1])
    """
    count = as_count("num_nodes", num_nodes)
    first, second = (ids.astype(np.int64) for ids in checked_ends(senders, receivers, count, count))
    forward, backward = _keys(first, second, count), _keys(second, first, count)
    forward_order, backward_order = (np.argsort(keys, kind="stable") for keys in (forward, backward))
    ranks = np.empty(len(forward), np.int64)  # of an edge among its parallel edges
    forward, wanted = forward[forward_order], backward[backward_order]
    ranks[forward_order] = np.arange(len(forward)) - np.searchsorted(forward, forward)
    places = np.searchsorted(forward, wanted) + ranks[backward_order]
    is_there = places < np.searchsorted(forward, wanted, side="right")
    ids = np.full(len(forward), -1)
    ids[backward_order[is_there]] = forward_order[places[is_there]]
    return ids


def _keys(senders: np.ndarray, receivers: np.ndarray, num_nodes: int) -> np.ndarray:
    return senders * num_nodes + receivers


def _distinct(random: np.random.Generator, count: int, size: int) -> np.ndarray:
    """Returns different numbers below a count, int64 [size], in random order."""
    if 3 * size > count:
        return random.permutation(count)[:size]
    found = np.empty(0, np.int64)
    while len(found) < size:
        drawn = random.integers(0, count, 2 * size)
        together = np.concatenate([found, drawn])
        found = together[np.sort(np.unique(together, return_index=True)[1])]  # in the order drawn
    return found[:size]


def roc_auc(labels: Numbers, scores: Numbers) -> float:
    """Returns how often a link scores higher than a pair that is no link; equal scores count half.

    Args:
      labels: bool or 0 and 1 [pairs], true for links.
      scores: floating [pairs].

    Raises:
      ValueError: shapes differ, labels are neither 0 nor 1 or all the same, or a score is NaN.

    Example:
      >>> roc_auc([1, 1, 0, 0], [0.9, 0.4, 0.4, 0.1])
      0.875

    Reference: Fawcett, An introduction to ROC analysis, 2006.
    """
    from scipy.stats import rankdata

    values, is_link = _labelled(labels, scores)
    links, others = int(is_link.sum()), int((~is_link).sum())
    ranks = rankdata(values)[is_link].sum()
    return float((ranks - links * (links + 1) / 2) / (links * others))


def average_precision(labels: Numbers, scores: Numbers) -> float:
    """Returns the mean precision at the scores of the links; pairs of equal scores count together.

    Args:
      labels: bool or 0 and 1 [pairs], true for links.
      scores: floating [pairs].

    Raises:
      ValueError: see `roc_auc`.

    Example:
      >>> average_precision([1, 0, 1, 0], [0.9, 0.8, 0.7, 0.1])
      0.8333333333333333

    Reference: sklearn.metrics.average_precision_score of scikit-learn.
    """
    values, is_link = _labelled(labels, scores)
    order = np.argsort(-values, kind="stable")
    values, found = values[order], np.cumsum(is_link[order])
    last = np.flatnonzero(np.append(values[1:] != values[:-1], True))  # of equal scores
    gained = np.diff(found[last], prepend=0)
    return float((gained * found[last] / (last + 1)).sum() / found[-1])


def mean_reciprocal_rank(positives: Numbers, negatives: Numbers) -> float:
    """Returns the mean of 1 over the rank of each link among its negatives; equal scores get their mean rank.

    Args:
      positives: floating [links], their scores.
      negatives: floating [links, k], the scores of each link's negatives.

    Raises:
      ValueError: shapes do not fit, there are no links, or a score is NaN.

    Example:
      >>> mean_reciprocal_rank([3.0, 1.0], [[1.0, 2.0], [5.0, 0.0]])
      0.75
    """
    links, others = _pair(positives, negatives)
    if others.ndim != 2 or len(others) != len(links):
        raise ValueError(f"negatives must be [{len(links)}, k], got shape {others.shape}")
    higher, equal = (others > links[:, None]).sum(axis=1), (others == links[:, None]).sum(axis=1)
    return float((1 / (1 + higher + equal / 2)).mean())


def hits_at(k: int, positives: Numbers, negatives: Numbers) -> float:
    """Returns the fraction of links that score higher than the `k`-th highest of all negatives.

    Args:
      k: rank of the negative with which links are compared.
      positives: floating [links], their scores.
      negatives: floating [...], the scores of all negatives; with fewer than `k` the fraction is 1.

    Raises:
      ValueError: there are no links, `k` is not positive, or a score is NaN.

    Example:
      >>> hits_at(2, [3.0, 1.0], [5.0, 2.0, 0.0])
      0.5
    """
    links, others = _pair(positives, negatives)
    if k < 1:
        raise ValueError(f"k={k} must be positive")
    if others.size < k:
        return 1.0
    return float((links > np.sort(others, axis=None)[-k]).mean())


def _labelled(labels: Numbers, scores: Numbers) -> tuple[np.ndarray, np.ndarray]:
    """Returns float64 scores, and which pairs are links; see `roc_auc`."""
    values, is_link = _scores("scores", scores, 1), np.asarray(labels)
    if is_link.shape != values.shape:
        raise ValueError(f"labels and scores must have one shape, got {is_link.shape} and {values.shape}")
    if not np.isin(is_link, (0, 1)).all():
        raise ValueError("labels must be 0 or 1")
    is_link = is_link.astype(bool)
    links, others = int(is_link.sum()), int((~is_link).sum())
    if not links or not others:
        raise ValueError(f"labels must have both 0 and 1, got {others} zeros and {links} ones")
    return values, is_link


def _pair(positives: Numbers, negatives: Numbers) -> tuple[np.ndarray, np.ndarray]:
    links, others = _scores("positives", positives, 1), _scores("negatives", negatives)
    if not len(links):
        raise ValueError("positives is empty")
    return links, others


def _scores(name: str, scores: Numbers, rank: int | None = None) -> np.ndarray:
    """Returns float64 scores, after checking that none is NaN."""
    array = scores if isinstance(scores, jax.Array) else np.asarray(scores)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise ValueError(f"{name} must be floating, got {array.dtype}")
    values = np.asarray(array).astype(np.float64)
    if rank is not None and values.ndim != rank:
        raise ValueError(f"{name} must have one axis, got shape {values.shape}")
    if np.isnan(values).any():
        raise ValueError(f"{name} has NaN")
    return values
