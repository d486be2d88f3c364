"""A synthetic graph of papers with the shapes of Cora and learnable labels, for machines without its files."""

import numpy as np

from jmp_train.graphs.datasets.graph_data import NodeData

NODES, FEATURES, CLASSES = 2708, 1433, 7
TRAIN_OF_A_CLASS, VALIDATION, TEST = 20, 500, 1000

_CITED = 2  # papers cited by each paper, for about as many edges as in Cora, 10,556
_WITHIN = 0.8  # fraction of citations within a class; 0.81 in Cora
_WORDS = 18  # drawn for each paper, as many as Cora's papers have
_OF_THE_CLASS = 0.25  # fraction of words drawn from those of the paper's class


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
    labels = random.permutation(np.arange(NODES, dtype=np.int32) % CLASSES)
    citing, cited = _citations(random, labels)
    senders, receivers = np.concatenate([citing, cited]), np.concatenate([cited, citing])
    senders, receivers = np.unique(np.stack([receivers, senders]), axis=1)[::-1]

    order = random.permutation(NODES).astype(np.int32)
    of_class = [order[labels[order] == label] for label in range(CLASSES)]
    train = np.concatenate([members[:TRAIN_OF_A_CLASS] for members in of_class])
    others = order[~np.isin(order, train)]
    return NodeData(
        senders,
        receivers,
        _words(random, labels),
        labels,
        CLASSES,
        train,
        others[:VALIDATION],
        others[-TEST:],
    )


def _citations(random: np.random.Generator, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of a paper and an earlier one, int32 [pairs] each."""
    citing = np.repeat(np.arange(1, NODES, dtype=np.int32), _CITED)
    by_class = np.argsort(labels, kind="stable")
    starts = np.searchsorted(labels[by_class], np.arange(CLASSES))
    rank = np.empty(NODES, np.int64)  # number of earlier papers of its class
    rank[by_class] = np.arange(NODES) - starts[labels[by_class]]
    age = random.random(len(citing)) ** 2  # among the earlier papers, older ones more often
    among_class = by_class[starts[labels[citing]] + (age * rank[citing]).astype(np.int64)]
    among_all = (age * citing).astype(np.int64)
    is_within = (random.random(len(citing)) < _WITHIN) & (rank[citing] > 0)
    return citing, np.where(is_within, among_class, among_all).astype(np.int32)


def _words(random: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """Returns the words of each paper, float32 [nodes, words]; the words of a class are every 7th."""
    drawn = random.integers(FEATURES, size=(NODES, _WORDS))
    of_class = random.integers(FEATURES // CLASSES, size=drawn.shape) * CLASSES + labels[:, None]
    is_of_class = random.random(drawn.shape) < _OF_THE_CLASS
    words = np.zeros((NODES, FEATURES), np.float32)
    np.put_along_axis(words, np.where(is_of_class, of_class, drawn), 1, axis=1)
    return words
