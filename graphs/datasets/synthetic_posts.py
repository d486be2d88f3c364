"""A synthetic graph of Reddit's size and kind: communities, hubs, and features that separate the classes.

At scale 1 it has Reddit's 232,965 nodes and 114,615,892 edges (each pair in both directions, none twice, no
self-loops). A smaller scale shrinks both alike, so that the mean degree stays 492, but no graph is denser than one edge
per eight pairs of nodes: below a scale of 0.0169 the mean degree is an eighth of the number of nodes.
Degrees decrease as one over their rank, from about Reddit's largest, 21,657, at scale 1, and from less than half
of the nodes in a small graph. Up to three quarters of a node's edges go to its own class, fewer if half of
that class would not be enough: 0.6 of all at scale 1, 0.7 at 0.02. To leave room for them, a small graph has
fewer classes: one per twice the mean degree of nodes, which makes 4 at a scale of 0.02, and
Reddit's 41 from 0.174 on.
"""

import numpy as np

from jmp_train.graphs.datasets.graph_data import NodeData
from jmp_train.graphs.datasets.reddit import REDDIT_CLASSES, REDDIT_FEATURES, sorted_ends

NODES = 232_965
EDGES = 114_615_892
TRAIN, TEST = 153_431, 55_703  # numbers of nodes; the other 23,831 are for validation

_FEWEST = 100  # nodes
_DENSEST = 1 / 8  # of all pairs
_WITHIN = 3 / 4  # the fraction of a node's edges that go to its own class, if it has room
_DRAWN_FOR_LARGEST = 36_000  # about 21,000 of them remain, because edges between hubs are drawn many times
_DRAWN_AT_ONCE = 2**22


def synthetic_reddit(scale: float = 1.0, seed: int = 0) -> NodeData:
    """Returns a graph like Reddit's, with the numbers of nodes and edges in the module's docstring.

    Args:
      scale: the fraction of Reddit's nodes and edges, at most 1.
      seed: seed of NumPy's generator: the same seed gives the same data.

    Returns:
      The data, with edges sorted by receiver, then sender. A node's features are its class's center plus
      the same amount of normal noise, with mean 0 and variance 1 together, as Reddit's.

    Raises:
      ValueError: the scale is not in (0, 1], or leaves fewer than 100 nodes.

    Example:
      >>> data = synthetic_reddit(0.001)
      >>> data.num_nodes, len(data.senders), data.features.shape
      (233, 6756, (233, 602))
    """
    if not 0 < scale <= 1:
        raise ValueError(f"scale={scale} must be between 0 (excluded) and 1")
    nodes = round(NODES * scale)
    if nodes < _FEWEST:
        raise ValueError(f"scale={scale} gives {nodes} of {NODES} nodes; a graph needs at least {_FEWEST}")
    pairs = round(min(EDGES / 2 * scale, nodes * (nodes - 1) / 2 * _DENSEST))
    classes = min(REDDIT_CLASSES, nodes**2 // (4 * pairs))  # of twice the mean degree, 2 * pairs / nodes
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(nodes, dtype=np.int32) % classes)
    centers = random.standard_normal((classes, REDDIT_FEATURES), np.float32)
    centers -= centers.mean(axis=0)
    features = random.standard_normal((nodes, REDDIT_FEATURES), np.float32)
    for start in range(0, nodes, 2**14):  # without a second array of the features' size
        rows = features[start : start + 2**14]
        rows += centers[labels[start : start + 2**14]]
        rows *= np.float32(0.5**0.5)
    order = random.permutation(nodes).astype(np.int32)
    parts = np.split(order, [round(TRAIN * scale), nodes - round(TEST * scale)])
    train, validation, test = map(np.sort, parts)

    senders, receivers = both_directions(_draw_pairs(random, labels, pairs), nodes)
    return NodeData(senders, receivers, features, labels, REDDIT_CLASSES, train, validation, test)


def heavy_tailed(count: int, mean: float, largest: float) -> np.ndarray:
    """Returns degrees that decrease as one over their rank: a Pareto distribution, cut off at the largest.

    Args:
      count: number of degrees.
      mean: their mean, less than the largest.
      largest: the largest.

    Returns:
      float64 [count], descending.

    Example:
      >>> degrees = heavy_tailed(10_000, 492, 21_657)
      >>> [round(float(x)) for x in (degrees.mean(), degrees.max(), np.median(degrees))]
      [492, 21398, 178]
    """
    ranks = (np.arange(count) + 0.5) / count

    def degrees(least: float) -> np.ndarray:
        return 1 / (1 / largest + ranks * (1 / least - 1 / largest))

    low, high = 0.0, largest
    for _ in range(60):  # finds the smallest degree by bisection, because the mean increases with it
        least = (low + high) / 2
        low, high = (least, high) if degrees(least).mean() < mean else (low, least)
    return degrees(high)


def both_directions(pairs: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns senders and receivers, int32 [2 * pairs], sorted by receiver, then sender.

    Args:
      pairs: int64 [pairs], `one * num_nodes + other` for each pair.
      num_nodes: number of nodes.

    Example:
      >>> both_directions(np.array([0 * 3 + 1, 1 * 3 + 2]), 3)
      (array([1, 0, 2, 1], dtype=int32), array([0, 1, 1, 2], dtype=int32))
    """
    ones, others = np.divmod(pairs, num_nodes)
    others *= num_nodes
    others += ones
    keys = np.concatenate([pairs, others])
    del ones, others
    return sorted_ends(keys, num_nodes)


def _draw_pairs(random: np.random.Generator, labels: np.ndarray, count: int) -> np.ndarray:
    """Returns distinct pairs of nodes, int64 [count], as `lesser * nodes + greater`."""
    nodes = len(labels)
    members = np.argsort(labels, kind="stable").astype(np.int32)  # the classes one after another
    degrees = random.permutation(heavy_tailed(nodes, 2 * count / nodes, min(_DRAWN_FOR_LARGEST, nodes / 2)))
    sizes = np.bincount(labels)
    within = np.minimum(_WITHIN * degrees, (sizes / 2)[labels[members]])
    all_within, all_across = np.cumsum(within), np.cumsum(degrees - within)
    last = np.cumsum(sizes)
    high = all_within[last - 1]
    low = np.concatenate([[0.0], high[:-1]])
    share = all_within[-1] / degrees.sum()

    def draw(count: int) -> np.ndarray:
        inside = random.binomial(count, share)
        one = np.searchsorted(all_within, random.random(inside) * all_within[-1])
        of = labels[members[one]]
        other = np.searchsorted(all_within, low[of] + random.random(inside) * (high - low)[of])
        across = random.random((2, count - inside)) * all_across[-1]
        ends = np.hstack([np.stack([one, other]), np.searchsorted(all_across, across)])
        one, other = members[np.minimum(ends, nodes - 1)]
        pairs = np.minimum(one, other).astype(np.int64)
        pairs *= nodes
        pairs += np.maximum(one, other)
        return pairs[one != other]

    pairs, share_of_new = np.zeros(0, np.int64), 0.75
    while len(pairs) < count:
        before = len(pairs)
        wanted = int((count - before) / share_of_new) + 100
        drawn = np.concatenate([draw(min(_DRAWN_AT_ONCE, wanted - at)) for at in range(0, wanted, _DRAWN_AT_ONCE)])
        drawn.sort()
        pairs = np.concatenate([pairs, drawn])
        pairs.sort(kind="stable")  # detects that these are two sorted parts
        pairs = pairs[np.concatenate([[True], pairs[1:] != pairs[:-1]])]
        share_of_new = max((len(pairs) - before) / wanted, 0.01)
    surplus = random.choice(len(pairs), len(pairs) - count, replace=False, shuffle=False)
    return np.delete(pairs, surplus)
