from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pytrees import assert_bitwise_equal

from jmp_train import graphs

pytestmark = pytest.mark.quick


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
