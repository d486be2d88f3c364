"""The parts of nodes: their sizes, how few edges run between them, and bad arguments."""

import numpy as np
import pytest

from jmp_train import graphs

pytestmark = pytest.mark.quick


def cliques(count: int, size: int) -> tuple[np.ndarray, graphs.HostEdges]:
    """Returns the clique of each node, and cliques in a ring, an edge from each to the next, nodes shuffled."""
    names = np.random.default_rng(0).permutation(count * size)
    owner = np.empty(count * size, int)
    owner[names] = np.arange(count * size) // size
    left, right = np.nonzero(~np.eye(size, dtype=bool))
    starts = np.arange(count)[:, None] * size
    senders = np.concatenate([(starts + left).ravel(), starts.ravel()])
    receivers = np.concatenate([(starts + right).ravel(), np.roll(starts.ravel(), 1)])
    return owner, graphs.host_edges(names[senders], names[receivers], count * size)


def cut_edges(edges: graphs.HostEdges, parts: np.ndarray) -> int:
    receivers = np.repeat(np.arange(edges.num_targets), edges.in_degrees)
    return int((parts[edges.sources] != parts[receivers]).sum())


def test_greedy_keeps_cliques_together() -> None:
    _, edges = cliques(12, 8)
    found = {method: graphs.partition_nodes(edges, 4, method=method) for method in ("greedy", "ranges")}
    assert found["greedy"].dtype == np.int32
    assert sorted(set(found["greedy"].tolist())) == [0, 1, 2, 3]
    # Each part has three cliques of 56 edges, and at best 4 of the ring's 12 edges run between parts.
    assert cut_edges(edges, found["greedy"]) < 0.1 * edges.num_edges < cut_edges(edges, found["ranges"])
    np.testing.assert_array_equal(found["greedy"], graphs.partition_nodes(edges, 4))


@pytest.mark.parametrize("method", ["greedy", "ranges"])
def test_parts_have_like_numbers_of_nodes_and_edges(method: str) -> None:
    random = np.random.default_rng(1)
    receivers = (300 * random.random(6_000) ** 3).astype(int)  # degrees fall from several hundred to few
    edges = graphs.host_edges(random.integers(0, 300, 6_000), receivers, 300)
    parts = graphs.partition_nodes(edges, 5, method=method)
    nodes = np.bincount(parts, minlength=5) / 300
    into = np.bincount(parts, weights=edges.in_degrees, minlength=5) / 6_000
    largest = (edges.in_degrees / 6_000 + 1 / 300).max()  # no part is cut through a node
    assert (nodes + into).max() <= 1.05 * 2 / 5 + largest
    assert (nodes + into).min() > 0


def test_a_hub_with_all_edges_is_a_part_of_its_own() -> None:
    star = graphs.host_edges([0] * 50, [0] * 50, 40)
    for method in ("greedy", "ranges"):
        hub, *others = graphs.partition_nodes(star, 2, method=method).tolist()
        assert others == [1 - hub] * 39


def test_nodes_without_edges_and_one_part() -> None:
    empty = graphs.host_edges([], [], 7)
    for method in ("greedy", "ranges"):
        assert np.bincount(graphs.partition_nodes(empty, 7, method=method)).tolist() == [1] * 7
        assert graphs.partition_nodes(empty, 1, method=method).tolist() == [0] * 7


def test_bad_arguments_are_named() -> None:
    graph = graphs.from_edges([0, 1], [1, 2], 3)
    for count in (0, 4):
        with pytest.raises(ValueError, match=rf"n_parts={count} must be between 1 and the 3 nodes of the graph"):
            graphs.partition_nodes(graph, count)
    with pytest.raises(TypeError, match=r"n_parts=1.5 must be an integer"):
        graphs.partition_nodes(graph, 1.5)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"method='metis' must be one of 'greedy', 'ranges'"):
        graphs.partition_nodes(graph, 2, method="metis")
    with pytest.raises(TypeError, match=r"graph must be a Graph or HostEdges, got list"):
        graphs.partition_nodes([], 2)  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        ValueError, match=r"graph has 3 sources and 2 targets: graphs with two types of nodes cannot be partitioned"
    ):
        graphs.partition_nodes(graphs.host_edges([2], [1], 3, 2), 2)
    with pytest.raises(ValueError, match=r"graph is padded: unpad it first"):
        graphs.partition_nodes(graphs.pad(graph, 8, 8), 2)
