from typing import Any

import jax
import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from odd_graphs import ODD, Ends, edges

from jmp_train import graphs

pytestmark = pytest.mark.quick


def make(ends: Ends, **features: Any) -> graphs.Graph:
    return graphs.from_edges(*ends, edges=features or None, formats=("coo",))


def counts(ends: Ends) -> np.ndarray:
    """Returns the number of edges from each node to each."""
    found = np.zeros((ends[2], ends[2]))
    np.add.at(found, ends[:2], 1)
    return found


def laplacian(ends: Ends) -> np.ndarray:
    both = (counts(ends) + counts(ends).T) / 2
    degrees = both.sum(1)
    scale = 1 / np.sqrt(np.where(degrees > 0, degrees, 1))
    return np.eye(ends[2]) - scale[:, None] * both * scale


def check_laplacian(ends: Ends, k: int) -> None:
    """Asserts that encodings are orthonormal eigenvectors of the smallest eigenvalues but the first."""
    found, matrix = graphs.laplacian_pe(make(ends), k).astype(np.float64), laplacian(ends)
    values = np.linalg.eigvalsh(matrix)[1 : k + 1]
    assert found.shape == (ends[2], k)
    assert not found[:, len(values) :].any()
    found = found[:, : len(values)]
    np.testing.assert_allclose(found.T @ found, np.eye(len(values)), atol=1e-5)
    np.testing.assert_allclose(matrix @ found, found * values, atol=1e-5)
    largest = np.abs(found).max(0, initial=0)
    for column, size in zip(found.T, largest, strict=True):
        firsts = [np.argmax(np.abs(column) >= (1 - tie) * size) for tie in (2e-7, 1e-5)]  # of ties, the first counts
        assert (column[firsts] > 0).any()


def check_random_walk(ends: Ends, k: int) -> None:
    weights = np.random.default_rng(0).uniform(0.5, 2, len(ends[0])).astype(np.float32)
    for weight, matrix in ((None, counts(ends)), ("w", counts((ends[0][:0], ends[1][:0], ends[2])))):
        if weight:
            np.add.at(matrix, ends[:2], weights)
        totals = matrix.sum(1, keepdims=True)
        steps = matrix / np.where(totals > 0, totals, 1)
        wanted = [np.diagonal(np.linalg.matrix_power(steps, i + 1)) for i in range(k)]
        found = graphs.random_walk_pe(make(ends, w=weights), k, weight)
        np.testing.assert_allclose(found, np.array(wanted).T.reshape(ends[2], k), rtol=1e-6, atol=1e-7)


def check_distances(ends: Ends, limit: int) -> None:
    network = nx.MultiDiGraph()
    network.add_nodes_from(range(ends[2]))
    network.add_edges_from(zip(*(ids.tolist() for ids in ends[:2]), strict=True))
    wanted = np.full((1, ends[2] + 1, ends[2] + 1), -1)
    for start, reached in nx.all_pairs_shortest_path_length(network, limit):
        for end, distance in reached.items():
            wanted[0, start, end] = distance
    np.testing.assert_array_equal(graphs.shortest_path_distances(make(ends), limit, ends[2] + 1), wanted)


@pytest.mark.parametrize("ends", ODD.values(), ids=ODD)
def test_encodings_of_odd_graphs(ends: Ends) -> None:
    check_laplacian(ends, 3)
    check_random_walk(ends, 5)
    check_distances(ends, 1)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(edges(), st.integers(0, 6))
def test_encodings_equal_dense_algebra(ends: Ends, k: int) -> None:
    check_laplacian(ends, k)
    check_random_walk(ends, k)
    check_distances(ends, k)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("network", [nx.star_graph(600), nx.barabasi_albert_graph(800, 2, seed=0)], ids=["hub", "many"])
def test_of_many_nodes_by_the_sparse_eigensolver(network: nx.Graph) -> None:
    ends = np.array(network.to_directed().edges)
    check_laplacian((ends[:, 0], ends[:, 1], len(network)), 4)


def test_graphs_of_a_batch_are_encoded_apart() -> None:
    parts = [make(ODD[name]) for name in ("hub", "isolated", "one node", "multi-edges", "none")]
    batch = graphs.batch(parts)
    for encode in (graphs.laplacian_pe, graphs.random_walk_pe):
        wanted = np.concatenate([encode(part, 3) for part in parts])
        np.testing.assert_array_equal(encode(batch, 3), wanted)
        np.testing.assert_array_equal(encode(graphs.to_jraph(batch), 3), wanted)
    found = graphs.shortest_path_distances(batch, 2)
    assert found.shape == (5, 40, 40)
    for part, mine in zip(parts, found, strict=True):
        np.testing.assert_array_equal(mine, graphs.shortest_path_distances(part, 2, 40)[0])
    assert graphs.shortest_path_distances(parts[-1], 2).shape == (1, 0, 0)


def test_signs_are_flipped_by_a_key() -> None:
    batch = graphs.batch([make(ODD["multi-edges"])] * 40)
    fixed = graphs.laplacian_pe(batch, 2)
    flipped = graphs.laplacian_pe(batch, 2, jax.random.key(0))
    signs = (flipped / fixed).reshape(40, 3, 2)
    np.testing.assert_array_equal(signs, signs[:, :1].repeat(3, axis=1))
    assert set(signs[:, 0].ravel().tolist()) == {-1.0, 1.0}
    assert abs(signs[:, 0].sum()) < 30
    np.testing.assert_array_equal(flipped, graphs.laplacian_pe(batch, 2, jax.random.key(0)))


def test_what_encodings_refuse() -> None:
    graph = make(ODD["hub"], w=np.ones((80, 1), np.float32), bad=np.full(80, -1, np.float32))
    cases: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (graphs.laplacian_pe, (graph, -1), ValueError, "k=-1 must be at least 0"),
        (graphs.laplacian_pe, (graphs.pad(graph, 50, 90), 1), ValueError, "graph is padded: unpad it first"),
        (graphs.laplacian_pe, (3, 1), TypeError, "graph must be a Graph or a jraph.GraphsTuple, got int"),
        (graphs.random_walk_pe, (graph, 1.5), TypeError, "k=1.5 must be an integer"),
        (graphs.random_walk_pe, (graph, 1, "v"), ValueError, "weight='v' is not an edge feature; there are: 'w'"),
        (graphs.random_walk_pe, (graph, 1, "w"), ValueError, r"edges\['w'\] must have one axis .*got shape \(80, 1\)"),
        (graphs.random_walk_pe, (graph, 1, "bad"), ValueError, r"edges\['bad'\] must be at least 0 .*got -1.0"),
        (graphs.shortest_path_distances, (graph, -2), ValueError, "max_distance=-2 must be at least 0"),
        (graphs.shortest_path_distances, (graph, 2, 39), ValueError, "max_nodes=39 is too small: a graph has 40 nodes"),
    ]
    for function, arguments, kind, message in cases:
        with pytest.raises(kind, match=message):
            function(*arguments)
    with pytest.raises(TypeError, match="graph is traced"):
        jax.jit(lambda graph: graphs.laplacian_pe(graph, 1))(graph)
