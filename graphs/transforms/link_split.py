"""Splits of a graph's edges for link prediction: links to train on, to validate and to test, with negatives."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from jmp_train.graphs.sampling import global_negatives, reverse_edge_ids
from jmp_train.graphs.structure import Graph, as_count
from jmp_train.graphs.transforms.edge_lists import check_keeps_edges, edges_on_host, with_edge_list
from jmp_train.policies.pytrees import check_number


class LinkSplit(NamedTuple):
    """One part of the split.

    Attributes:
      graph: the graph with the edges along which messages may pass.
      senders: int32 [pairs], the links to predict, then as many pairs that are no edges as were asked for.
      receivers: int32 [pairs].
      labels: int32 [pairs], 1 for links.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2, 3], [1, 2, 3, 0], 4)
      >>> random_link_split(graph, np.random.default_rng(0), num_val=1, num_test=1)[1].labels
      array([1, 0], dtype=int32)
    """

    graph: Graph
    senders: np.ndarray
    receivers: np.ndarray
    labels: np.ndarray


def random_link_split(
    graph: Graph,
    random: np.random.Generator,
    *,
    num_val: float = 0.1,
    num_test: float = 0.2,
    is_undirected: bool = False,
    negatives_per_link: float = 1.0,
    formats: Sequence[str] | None = None,
) -> tuple[LinkSplit, LinkSplit, LinkSplit]:
    """Returns the parts to train on, to validate and to test, with disjoint links; runs on the host.

    Messages of the first two pass along the training links only, and those of the last along the validation links too.

    Args:
      graph: an unpadded graph.
      random: NumPy's generator; the same one gives the same split.
      num_val: the fraction of the links to validate, or their number.
      num_test: the fraction of the links to test, or their number.
      is_undirected: True if each edge has a reverse edge: both are in the same part, as one link.
      negatives_per_link: number of pairs per link that are no edges, all of them different.
      formats: see `from_edges`; None for the graph's formats.

    Raises:
      TypeError: see `edge_subgraph`.
      ValueError: there are fewer links or pairs, an edge has no reverse, or see `edge_subgraph`.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2, 3], [1, 2, 3, 0], 4)
      >>> train, val, test = random_link_split(graph, np.random.default_rng(0), num_val=1, num_test=1)
      >>> [part.graph.num_edges for part in (train, val, test)]
      [2, 2, 3]

    Reference: PyTorch Geometric's RandomLinkSplit.
    """
    for name, number in (("num_val", num_val), ("num_test", num_test), ("negatives_per_link", negatives_per_link)):
        check_number(name, number)
    if negatives_per_link < 0:
        raise ValueError(f"negatives_per_link={negatives_per_link} must be at least 0")
    edges = edges_on_host(graph)
    check_keeps_edges(graph.connections)
    links = np.arange(len(edges.senders))
    back = links
    if is_undirected:
        back = reverse_edge_ids(edges.senders, edges.receivers, graph.num_nodes)
        if (back < 0).any():
            raise ValueError(f"edge {int((back < 0).argmax())} has no reverse edge, but is_undirected=True")
        links = links[links <= back]
    val, test = (int(part * len(links)) if isinstance(part, float) else part for part in (num_val, num_test))
    val, test = as_count("num_val", val), as_count("num_test", test)
    if val + test > len(links):
        raise ValueError(f"num_val={num_val} and num_test={num_test} are more than the {len(links)} links")
    links = random.permutation(links)
    parts = np.split(links, [len(links) - val - test, len(links) - test])
    counts = [round(negatives_per_link * len(part)) for part in parts]
    pairs = global_negatives(random, edges.senders, edges.receivers, graph.num_nodes, sum(counts))
    bounds = np.cumsum(counts)[:-1]
    others = zip(*(np.split(ids, bounds) for ids in pairs), strict=True)
    messages = (parts[0], parts[0], np.concatenate(parts[:2]))

    def part(links: np.ndarray, others: tuple[np.ndarray, np.ndarray], messages: np.ndarray) -> LinkSplit:
        kept = np.unique(np.concatenate([messages, back[messages]]))
        ends = (edges.senders[links], edges.receivers[links])
        senders, receivers = (np.concatenate([x, y]).astype(np.int32) for x, y in zip(ends, others, strict=True))
        labels = np.repeat(np.array([1, 0], np.int32), [len(links), len(others[0])])
        return LinkSplit(with_edge_list(graph, edges.take(kept), formats), senders, receivers, labels)

    train, validated, tested = map(part, parts, others, messages)
    return train, validated, tested
