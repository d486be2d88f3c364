from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jmp_train import graphs

pytestmark = pytest.mark.quick

IDS = np.repeat([0, 1, 3], [40, 3, 57])  # graph 2 has no point


def points(dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(100, 3)).astype(dtype)


def distances(array: np.ndarray) -> np.ndarray:
    """Returns all distances in float64, infinite between points of two graphs."""
    wide = array.astype(np.float64)
    apart = np.sqrt(((wide[:, None] - wide) ** 2).sum(axis=2))
    return np.where(IDS[:, None] == IDS, apart, np.inf)


def ends(graph: graphs.Graph) -> list[tuple[int, int]]:
    return list(zip(graph.receivers.tolist(), graph.senders.tolist(), strict=True))


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16])
@pytest.mark.parametrize("exclude_self", [False, True])
def test_the_nearest_are_those_of_all_distances(dtype: Any, exclude_self: bool) -> None:
    cloud = points(dtype)
    apart = distances(cloud)
    if exclude_self:
        np.fill_diagonal(apart, np.inf)
    nearest = np.argsort(apart, axis=1, kind="stable")[:, :4]
    wanted = [(to, int(of)) for to in range(100) for of in nearest[to] if np.isfinite(apart[to, of])]
    graph = graphs.knn_graph(cloud, 4, IDS, exclude_self=exclude_self)
    assert ends(graph) == wanted
    assert graph.n_node.tolist() == [40, 3, 0, 57]
    assert graph.n_edge.tolist() == [160, 6 if exclude_self else 9, 0, 228]


@pytest.mark.parametrize("self_loop", [False, True])
def test_all_within_a_radius(self_loop: bool) -> None:
    is_near = distances(points()) <= 0.9
    np.fill_diagonal(is_near, self_loop)
    graph = graphs.radius_graph(points(), 0.9, IDS, self_loop=self_loop)
    assert ends(graph) == [tuple(pair) for pair in np.argwhere(is_near).tolist()]
    assert graph.n_edge.tolist() == [int(is_near[graph].sum()) for graph in (i == IDS for i in range(4))]


def nearest(cloud: np.ndarray, k: int, radius: float, *, exclude_self: bool) -> list[tuple[int, int]]:
    """Returns receivers with the nearest senders, by distance and then by id; a point is nearest to itself."""
    found = []
    for to, point in enumerate(cloud):
        apart = np.sqrt(((cloud - point) ** 2).sum(1))
        near = [(-1.0 if of == to else apart[of], of) for of in range(len(cloud)) if apart[of] <= radius]
        found += [(to, of) for _, of in [each for each in sorted(near) if each[1] != to or not exclude_self][:k]]
    return found


def check_ties(cloud: np.ndarray, k: int) -> None:
    for exclude_self in (False, True):
        graph = graphs.knn_graph(cloud, k, exclude_self=exclude_self)
        assert ends(graph) == nearest(cloud, k, np.inf, exclude_self=exclude_self)
        graph = graphs.radius_graph(cloud, 1.0, self_loop=not exclude_self, max_neighbors=k)
        assert ends(graph) == sorted(nearest(cloud, k, 1.0, exclude_self=exclude_self))


@pytest.mark.parametrize("k", [1, 3, 4])
def test_of_points_at_equal_distance_the_first_are_taken(k: int) -> None:
    grid = np.stack(np.meshgrid(np.arange(5.0), np.arange(5.0)), -1).reshape(-1, 2)
    check_ties(np.random.default_rng(k).permutation(grid), k)
    check_ties(np.ones((6, 1)), k)


@pytest.mark.full
@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=12), st.integers(0, 5))
def test_ties_on_grids(points: list[tuple[int, int]], k: int) -> None:
    check_ties(np.array(points, np.float64).reshape(-1, 2), k)


def test_of_no_points_and_few() -> None:
    for make in (graphs.knn_graph, graphs.radius_graph):
        assert make(np.zeros((0, 2)), 1).num_nodes == 0
    assert graphs.knn_graph(np.zeros((3, 2)), 0).num_edges == 0
    assert graphs.knn_graph(np.ones((1, 2)), 1, exclude_self=True).num_edges == 0


def test_what_is_refused() -> None:
    cloud: Any = points()
    cases: list[tuple[type[Exception], tuple[Any, ...], str]] = [
        (TypeError, (cloud.astype(int), 1), "points must be floating, got int64"),
        (ValueError, (cloud[0], 1), r"points must have shape \[points, dimensions\], got shape \(3,\)"),
        (ValueError, (np.array([[0.0], [np.nan]]), 1), r"points\[1\] is not finite"),
        (ValueError, (cloud, -1), "k=-1 must be at least 0"),
        (TypeError, (cloud, 1, IDS / 1), "graph_ids must be integers, got float64"),
        (ValueError, (cloud, 1, IDS[1:]), r"graph_ids must have shape \(100,\), one for each point, got shape \(99,\)"),
        (ValueError, (cloud, 1, IDS[::-1]), "graph_ids must ascend from 0"),
        (ValueError, (cloud, 1, IDS - 1), "graph_ids must ascend from 0"),
        (ValueError, (cloud, 1, IDS * 10**8), "graph_ids has 300000000, far more graphs than the 100 points"),
    ]
    for kind, arguments, message in cases:
        with pytest.raises(kind, match=message):
            graphs.knn_graph(*arguments)
    for radius in (-1.0, np.nan):
        with pytest.raises(ValueError, match=f"radius={radius} must be at least 0"):
            graphs.radius_graph(cloud, radius)
    with pytest.raises(ValueError, match="max_neighbors=-1 must be at least 0"):
        graphs.radius_graph(cloud, 1.0, max_neighbors=-1)
    with pytest.raises(TypeError, match="points is traced"):
        jax.jit(lambda x: graphs.knn_graph(x, 1).senders)(cloud)


def test_lengths_of_edges() -> None:
    points = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    senders, receivers = np.array([0, 1, 2, 3]), np.array([1, 1, 4, 0])
    graph = graphs.pad(graphs.from_edges(senders, receivers, 5), 8, 6)
    whole = np.pad(points, ((0, 3), (0, 0)), constant_values=100)
    wanted = np.linalg.norm(points[senders] - points[receivers], axis=1)

    def results(x: jax.Array) -> tuple[jax.Array, ...]:
        lengths = lambda x, normalize=False: graphs.edge_lengths(graph, x, normalize=normalize)
        return lengths(x), lengths(x, True), jax.grad(lambda x: lengths(x).sum())(x), lengths(x.astype("bfloat16"))

    found, shares, gradient, half = map(np.asarray, jax.jit(results)(whole))
    np.testing.assert_allclose(found[:, 0], np.append(wanted, [0, 0]), rtol=1e-6)
    np.testing.assert_allclose(shares, found / wanted.max(), rtol=1e-6)
    assert np.isfinite(gradient).all() and not gradient[5:].any()
    assert half.dtype == "bfloat16"
