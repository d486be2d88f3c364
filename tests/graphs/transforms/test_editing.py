from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import jraph
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import assert_bitwise_equal

from jmp_train import graphs

pytestmark = pytest.mark.quick


def weighted() -> graphs.Graph:
    return graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 1], 4, edges={"w": jnp.array([1, 2, 3, 4], jnp.float16)})


def test_added_edges_come_last_with_their_features() -> None:
    graph = graphs.add_edges(weighted(), [3, 3], [3, 0], {"w": [0.1, 70.0], "new": np.ones((2, 2), np.int8)})
    assert graph.senders.tolist() == [0, 1, 2, 0, 3, 3]
    assert graph.receivers.tolist() == [1, 2, 0, 1, 3, 0]
    assert graph.edges["w"].dtype == jnp.float16
    np.testing.assert_array_equal(graph.edges["w"], np.array([1, 2, 3, 4, 0.1, 70], np.float16))
    assert graph.edges["new"].tolist() == [[0, 0]] * 4 + [[1, 1]] * 2
    assert (graph.in_degrees.tolist(), graph.n_edge.tolist()) == ([2, 2, 1, 1], [6])


def test_what_added_edges_do_not_have_is_0() -> None:
    assert graphs.add_edges(weighted(), [3], [3]).edges["w"].tolist() == [1, 2, 3, 4, 0]


def test_edges_added_to_a_batch_stand_in_their_graph() -> None:
    batch = graphs.batch([graphs.from_edges([0], [1], 2), graphs.from_edges([0], [0], 1)])
    more = graphs.add_edges(batch, [2, 1], [2, 0])
    assert (more.senders.tolist(), more.n_edge.tolist(), more.n_node.tolist()) == ([0, 1, 2, 2], [2, 2], [2, 1])
    with pytest.raises(ValueError, match="an edge connects two graphs of the batch, 0 and 1"):
        graphs.add_edges(batch, [0], [2])


def test_features_of_added_edges_that_do_not_fit() -> None:
    cases: list[tuple[Any, str]] = [
        ([1.0], r"edges\['w'\] must have 2 rows, one for each of the new edges, got shape \(1,\)"),
        ([[1.0], [2.0]], r"edges\['w'\] must have rows of shape \(\), got \(1,\)"),
        ([1.0, 1e6], r"edges\['w'\] is 1000000.0, which does not fit into float16"),
    ]
    for rows, message in cases:
        with pytest.raises(ValueError, match=message):
            graphs.add_edges(weighted(), [0, 1], [1, 0], {"w": rows})
    counts = graphs.from_edges([0], [0], 1, edges={"n": np.ones(1, np.int8)})
    with pytest.raises(ValueError, match=r"edges\['n'\] is 300, which does not fit into int8"):
        graphs.add_edges(counts, [0], [0], {"n": [300]})
    with pytest.raises(ValueError, match=r"receivers\[0\] = 4 is out of range for 4 nodes"):
        graphs.add_edges(weighted(), [0], [4])
    infinite = graphs.add_edges(weighted(), [0], [1], {"w": [np.inf]})
    assert np.isinf(infinite.edges["w"][4])


@pytest.mark.parametrize("edges", [[2, 0, 0], np.array([True, False, True, False])])
def test_removed_edges(edges: list[int]) -> None:
    graph = graphs.remove_edges(weighted(), edges, store_ids=True)
    assert (graph.senders.tolist(), graph.receivers.tolist(), graph.num_nodes) == ([1, 0], [2, 1], 4)
    assert graph.edges["w"].tolist() == [2, 4]
    assert (graph.edges["_ID"].tolist(), graph.edges["_ID"].dtype) == ([1, 3], jnp.int32)
    assert "_ID" not in graphs.remove_edges(weighted(), edges).edges


def test_edges_that_cannot_be_removed() -> None:
    cases: list[tuple[Any, type[Exception], str]] = [
        ([4], ValueError, r"edges\[0\] = 4 is out of range for 4"),
        ([-1], ValueError, r"edges\[0\] = -1 is out of range for 4"),
        ([[0]], ValueError, r"edges must have one axis, got shape \(1, 1\)"),
        ([0.0], TypeError, "edges must be integers, got float64"),
        ([True], ValueError, r"edges must be a mask of shape \(4,\), got shape \(1,\)"),
    ]
    for edges, kind, message in cases:
        with pytest.raises(kind, match=message):
            graphs.remove_edges(weighted(), edges)
    with pytest.raises(ValueError, match=r'graph was made with formats=\("csr",\), which does'):
        graphs.remove_edges(graphs.from_edges([0], [0], 1, formats=("csr",)), [0])


def test_of_jraphs_graphs() -> None:
    theirs = graphs.to_jraph(weighted())
    more = graphs.add_edges(theirs, [3], [3])
    assert isinstance(more, jraph.GraphsTuple)
    fewer = graphs.from_jraph(graphs.remove_edges(more, [0, 1, 2]))
    assert fewer.edges["w"].tolist() == [4, 0]


def test_the_formats_stay() -> None:
    graph = graphs.add_edges(graphs.from_edges([0], [1], 2, formats=("csr",)), [1], [0])
    assert graph.connections.ends is None
    assert graph.in_degrees.tolist() == [1, 1]
    assert graphs.add_edges(graph, [1], [0], formats=("coo",)).senders.tolist() == [1, 0, 1]


def bandwidth(graph: graphs.Graph) -> int:
    return int(abs(graph.senders - graph.receivers).max())


def shuffled(graph: Any, seed: int) -> graphs.Graph:
    """Returns a graph of networkx with its nodes named at random, and every edge in one direction."""
    names = np.random.default_rng(seed).permutation(len(graph))
    nodes = {node: names[place] for place, node in enumerate(graph)}
    ends = np.array([(nodes[u], nodes[v]) for u, v in graph.edges])
    return graphs.from_edges(ends[:, 0], ends[:, 1], len(graph), formats=("coo",))


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("make", "least"),
    [(lambda: nx.path_graph(200), 1), (lambda: nx.grid_2d_graph(6, 30), 7), (lambda: nx.balanced_tree(2, 6), 32)],
)
def test_reverse_cuthill_mckee_brings_neighbors_near(make: Callable[[], Any], least: int) -> None:
    """Of a path it is exact; a grid needs its shorter side, here with one more for the corner."""
    for seed in range(3):
        graph = shuffled(make(), seed)
        new, _ = graphs.reorder(graph, "rcm")
        assert bandwidth(new) <= least < bandwidth(graph)


def test_by_degree_the_first_nodes_have_most_edges_and_equals_keep_their_order() -> None:
    graph = graphs.rand_graph(300, 900)
    new, order = graphs.reorder(graph, "degree")
    degrees = np.asarray(graph.in_degrees)
    assert order.dtype == np.int32
    assert order.tolist() == sorted(range(300), key=lambda node: (-degrees[node], node))
    assert new.in_degrees.tolist() == sorted(degrees.tolist(), reverse=True)


@settings(max_examples=10, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    by=st.sampled_from(["degree", "rcm"]),
    sizes=st.lists(st.tuples(st.integers(1, 7), st.integers(0, 20)), min_size=1, max_size=3),
)
def test_the_graph_is_the_same_under_other_names(seed: int, by: str, sizes: list[tuple[int, int]]) -> None:
    random = np.random.default_rng(seed)
    parts = [
        graphs.from_edges(
            random.integers(0, nodes, edges),
            random.integers(0, nodes, edges),
            nodes,
            nodes={"h": random.integers(-9, 9, (nodes, 2)).astype(np.float16)},
            edges={"w": random.integers(-9, 9, edges).astype(np.float16)},
        )
        for nodes, edges in sizes
    ]
    graph = graphs.batch(parts)
    new, order = graphs.reorder(graph, by)
    assert_bitwise_equal((new.n_node, new.n_edge), (graph.n_node, graph.n_edge))
    owners = np.repeat(np.arange(len(sizes)), graph.n_node)
    np.testing.assert_array_equal(owners[order], owners)
    assert sorted(order.tolist()) == list(range(graph.num_nodes))
    np.testing.assert_array_equal(new.nodes["h"], np.asarray(graph.nodes["h"])[order])
    senders, receivers = (order[np.asarray(ids)] for ids in (new.senders, new.receivers))
    rows = zip(senders.tolist(), receivers.tolist(), new.edges["w"].tolist(), strict=True)
    old = graph.senders.tolist(), graph.receivers.tolist(), graph.edges["w"].tolist()
    assert sorted(rows) == sorted(zip(*old, strict=True))
    ends = list(zip(new.receivers.tolist(), new.senders.tolist(), strict=True))
    assert ends == sorted(ends)
    if by == "degree":
        assert_bitwise_equal(graphs.reorder(new, by)[0], new)


def test_parallel_edges_keep_their_order() -> None:
    graph = graphs.from_edges([1, 0, 1, 1], [0, 1, 0, 0], 2, edges={"w": jnp.arange(4)})
    assert graphs.reorder(graph)[0].edges["w"].tolist() == [0, 2, 3, 1]


def test_an_unknown_order_is_named() -> None:
    with pytest.raises(ValueError, match="by='metis' must be one of 'degree', 'rcm'"):
        graphs.reorder(graphs.rand_graph(3, 3), "metis")
