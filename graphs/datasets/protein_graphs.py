"""Synthetic proteins with the structure of TU Dortmund's PROTEINS: small graphs of secondary structure elements."""

import numpy as np

from jmp_train.graphs.datasets.graph_data import GraphData

PROTEINS_GRAPHS = 1113
KINDS = 3  # helix, sheet, turn
STAY = (0.8, 0.33)  # by class, the probability that an element has the kind of the one before it
CONTACT = 0.3
NOISE = 0.05


def synthetic_proteins(count: int = PROTEINS_GRAPHS, *, seed: int = 0) -> GraphData:
    """Returns synthetic graphs in two classes, which differ in the kinds of neighboring elements.

    As in PROTEINS, a node is an element (a helix, a sheet or a turn), and its neighbors are those next to it in the
    chain and some that are near. Numbers of nodes are those of PROTEINS, 4 to 620 with a mean of 39, with 3.7 edges per
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
