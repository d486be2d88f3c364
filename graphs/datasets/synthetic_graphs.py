"""Synthetic graphs with the shapes of public data sets and learnable labels, for machines without their files."""

import numpy as np

from jmp_train.graphs.datasets.graph_data import GraphData, NodeData
from jmp_train.graphs.datasets.reddit import REDDIT_CLASSES, REDDIT_FEATURES, sorted_ends

CORA_NODES, CORA_FEATURES, CORA_CLASSES = 2708, 1433, 7
CORA_TRAIN_OF_A_CLASS, CORA_VALIDATION, CORA_TEST = 20, 500, 1000

_CITED = 2  # papers cited by each paper, for about as many edges as in Cora, 10,556
_WITHIN_CLASS = 0.8  # fraction of citations within a class; 0.81 in Cora
_WORDS = 18  # drawn for each paper, as many as Cora's papers have
_OF_THE_CLASS = 0.25  # fraction of words drawn from those of the paper's class

POSTS_NODES = 232_965
POSTS_EDGES = 114_615_892
POSTS_TRAIN, POSTS_TEST = 153_431, 55_703  # numbers of nodes; the other 23,831 are for validation
_FEWEST = 100  # nodes
_DENSEST = 1 / 8  # of all pairs
_WITHIN = 3 / 4  # the fraction of a node's edges that go to its own class, if it has room
_DRAWN_FOR_LARGEST = 36_000  # about 21,000 of them remain, because edges between hubs are drawn many times
_DRAWN_AT_ONCE = 2**22
PROTEINS_GRAPHS = 1113
KINDS = 3  # helix, sheet, turn
STAY = (0.8, 0.33)  # by class, the probability that an element has the kind of the one before it
CONTACT = 0.3
NOISE = 0.05


def synthetic_cora(seed: int = 0) -> NodeData:
    """Returns synthetic papers that cite each other, with Cora's counts of nodes, words and classes.

    A paper cites two earlier ones, mostly of its class, and old ones more often; some words are more
    frequent in its class. Neither citations nor words alone determine the class.

    Args:
      seed: seed of NumPy's generator: the same seed gives the same data.

    Returns:
      The data, with each edge in both directions and no self-loops. A feature is 1 if the paper has the word,
      otherwise 0. There are 20 training nodes of each class, 500 validation nodes and 1,000 test nodes.

    Example:
      >>> data = synthetic_cora()
      >>> data.features.shape, data.num_classes, len(data.train), len(data.test)
      ((2708, 1433), 7, 140, 1000)
    """
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(CORA_NODES, dtype=np.int32) % CORA_CLASSES)
    citing, cited = _citations(random, labels)
    senders, receivers = np.concatenate([citing, cited]), np.concatenate([cited, citing])
    senders, receivers = np.unique(np.stack([receivers, senders]), axis=1)[::-1]

    order = random.permutation(CORA_NODES).astype(np.int32)
    of_class = [order[labels[order] == label] for label in range(CORA_CLASSES)]
    train = np.concatenate([members[:CORA_TRAIN_OF_A_CLASS] for members in of_class])
    others = order[~np.isin(order, train)]
    return NodeData(
        senders,
        receivers,
        _words(random, labels),
        labels,
        CORA_CLASSES,
        train,
        others[:CORA_VALIDATION],
        others[-CORA_TEST:],
    )


def _citations(random: np.random.Generator, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of a paper and an earlier one, int32 [pairs] each."""
    citing = np.repeat(np.arange(1, CORA_NODES, dtype=np.int32), _CITED)
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], np.arange(CORA_CLASSES))
    rank = np.empty(CORA_NODES, np.int64)  # number of earlier papers of its class
    rank[by_class] = np.arange(CORA_NODES) - starts[labels[by_class]]
    age = random.random(len(citing)) ** 2  # among the earlier papers, older ones more often
    among_class = by_class[starts[labels[citing]] + (age * rank[citing]).astype(np.int64)]
    among_all = (age * citing).astype(np.int64)
    is_within = (random.random(len(citing)) < _WITHIN_CLASS) & (rank[citing] > 0)
    return citing, np.where(is_within, among_class, among_all).astype(np.int32)


def _words(random: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Returns the words of each paper, float32 [nodes, words]; the words of a class are every 7th."""
    drawn = random.integers(CORA_FEATURES, size=(CORA_NODES, _WORDS))
    of_class = random.integers(CORA_FEATURES // CORA_CLASSES, size=drawn.shape) * CORA_CLASSES + labels[:, None]
    is_of_class = random.random(drawn.shape) < _OF_THE_CLASS
    words = np.zeros((CORA_NODES, CORA_FEATURES), np.float32)
    np.put_along_axis(words, np.where(is_of_class, of_class, drawn), 1, axis=1)
    return words


def synthetic_reddit(scale: float = 1.0, seed: int = 0) -> NodeData:
    """Returns a graph of Reddit's size and kind: communities, hubs, and features that separate the classes.

    At scale 1 it has Reddit's 232,965 nodes and 114,615,892 edges: each pair in both directions, none twice, no
    self-loops. A smaller scale shrinks both alike, so the mean degree stays 492. No graph is denser than one edge
    per eight pairs of nodes, so below a scale of 0.0169 the mean degree is an eighth of the number of nodes.
    Degrees decrease as one over their rank. The largest is about Reddit's, 21,657, at scale 1, and less than half of
    the nodes in a small graph. Up to three quarters of a node's edges go to its own class, fewer if half of that
    class is not enough: 0.6 of all at scale 1, 0.7 at 0.02. To leave room for them, a small graph has fewer classes,
    one per twice the mean degree of nodes: 4 at a scale of 0.02, and Reddit's 41 from 0.174 on.

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
    nodes = round(POSTS_NODES * scale)
    if nodes < _FEWEST:
        raise ValueError(f"scale={scale} gives {nodes} of {POSTS_NODES} nodes; a graph needs at least {_FEWEST}")
    pairs = round(min(POSTS_EDGES / 2 * scale, nodes * (nodes - 1) / 2 * _DENSEST))
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
    parts = np.split(order, [round(POSTS_TRAIN * scale), nodes - round(POSTS_TEST * scale)])
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


def synthetic_proteins(count: int = PROTEINS_GRAPHS, *, seed: int = 0) -> GraphData:
    """Returns synthetic graphs in two classes, which differ in the kinds of neighboring elements.

    As in PROTEINS, a node is an element (a helix, a sheet or a turn), and its neighbors are those next to it in the
    chain and some that are near. Numbers of nodes are those of PROTEINS, 4 to 620 with a mean of 39, with 3.6 edges per
    node. In one class an element usually has the kind of the one before it, and in the other not. Both have the same
    number of each kind, so only a model that uses neighbors separates the classes. One label of 20 is wrong.

    Args:
      count: number of graphs.
      seed: seed of NumPy's generator: the same seed gives the same graphs.

    Example:
      >>> data = synthetic_proteins(20)
      >>> len(data), data.num_classes, sorted(data.nodes), data.nodes["label"].max()
      (20, 2, ['label'], np.int32(2))

    Reference: Borgwardt et al., Protein function prediction via graph kernels, Bioinformatics 2005.
    """
    random = np.random.default_rng(seed)
    classes = (random.random(count) < 0.4).astype(np.int32)
    sizes = np.clip(np.exp(random.normal(3.3, 0.85, count)), 4, 620).astype(np.int32)
    kinds, ends = [], []
    for size, kind in zip(sizes, classes, strict=True):
        stays = random.random(size) < STAY[kind]
        steps = np.where(stays, 0, random.integers(1, KINDS, size))
        kinds.append((random.integers(KINDS) + np.cumsum(steps)) % KINDS)
        ends.append(_edges(random, int(size)))
    labels = np.where(random.random(count) < NOISE, 1 - classes, classes).astype(np.int32)
    senders, receivers = np.concatenate(ends, axis=1).astype(np.int32)
    n_edge = np.array([pair.shape[1] for pair in ends], np.int32)
    return GraphData(
        sizes, n_edge, senders, receivers, labels, 2, nodes={"label": np.concatenate(kinds).astype(np.int32)}
    )


def _edges(random: np.random.Generator, size: int) -> np.ndarray:
    """Returns the ends of edges, [2, edges]: along the chain, and between some 3 to 5 apart, in both directions."""
    chain = np.arange(size - 1)
    pairs = [np.stack([chain, chain + 1])]
    for apart in (3, 4, 5):
        first = np.flatnonzero(random.random(max(size - apart, 0)) < CONTACT)
        pairs.append(np.stack([first, first + apart]))
    one_way = np.concatenate(pairs, axis=1)
    return np.concatenate([one_way, one_way[::-1]], axis=1)
