"""Negatives of links: pairs of nodes that stand for edges that do not exist.

Those of a step are drawn under jit from a random key, or on the host from NumPy's generator. They always have the same
shapes, so fresh ones do not cause a retrace.

Reference: dgl.dataloading.negative_sampler of Deep Graph Library, https://www.dgl.ai.
"""

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import as_count, checked_ends


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
      TypeError: a number is not an integer.
      ValueError: a number is negative, or there are edges but no nodes.

    Example:
      >>> senders, receivers = uniform_negatives(jax.random.key(0), jnp.array([3, 1]), 5, k=2)
      >>> senders.tolist(), receivers.shape
      ([3, 3, 1, 1], (4,))
    """
    senders = jnp.repeat(jnp.asarray(senders, jnp.int32), as_count("k", k))
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
      TypeError: `k` is not an integer.
      ValueError: `k` is negative or too large.

    Example:
      >>> ends = jnp.array([0, 1, 2]), jnp.array([5, 6, 7])
      >>> senders, receivers = in_batch_negatives(jax.random.key(0), *ends, k=2)
      >>> senders.tolist(), [sorted(receivers[i : i + 2].tolist()) for i in (0, 2, 4)]
      ([0, 0, 1, 1, 2, 2], [[6, 7], [5, 7], [5, 6]])
    """
    senders, receivers = jnp.asarray(senders, jnp.int32), jnp.asarray(receivers, jnp.int32)
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
