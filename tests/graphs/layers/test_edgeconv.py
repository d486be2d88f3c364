"""EdgeConv along given edges, and between the nearest points of a cloud."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = pytest.mark.quick
NODES, EDGES = 40, 900
RANDOM = np.random.default_rng(0)
ENDS = RANDOM.integers(0, NODES - 1, (2, EDGES))  # no edge enters the last node
ENDS[1, :500] = 3
POINTS = jnp.asarray(RANDOM.normal(size=(2, 12, 3)), jnp.float32)
MASK = jnp.arange(12) < jnp.array([[12], [3]])  # fewer points than neighbors in the second cloud


def network() -> Any:
    return nnx.Sequential(nnx.relu, nnx.Linear(8, 4, rngs=nnx.Rngs(1)))


@pytest.mark.parametrize("dtype", ["float32", pytest.param("float16", marks=pytest.mark.full)])
@pytest.mark.parametrize("aggregator", ["max", pytest.param("mean", marks=pytest.mark.full)])
def test_implementations_agree_and_chunks_keep_nothing_of_edges(aggregator: str, dtype: str) -> None:
    x = jnp.asarray(RANDOM.normal(size=(NODES, 5)), dtype)
    found = []
    for implementation in IMPLEMENTATIONS:
        layer = graphs.EdgeConv(5, 8, network(), aggregator=aggregator, implementation=implementation, rngs=nnx.Rngs(0))
        definition, state = nnx.split(layer)
        formats = ("csr",) if implementation == "chunked" else ("coo",)
        graph = graphs.from_edges(ENDS[0], ENDS[1], NODES, formats=formats)
        policy = jt.get_policy("float32" if dtype == "float32" else "mixed_float16")

        def loss(state: Any, x: jax.Array, graph: Any = graph, definition: Any = definition) -> jax.Array:
            result = nnx.merge(definition, policy.cast_to_compute(state))(graph, x)  # noqa: B023
            return (result.astype(jnp.float32) ** 2).sum()

        found.append(jax.jit(jax.value_and_grad(loss, (0, 1)))(state, x))
        pullback = jax.eval_shape(lambda state, x: jax.vjp(loss, state, x)[1], state, x)
        floats = [leaf for leaf in jax.tree.leaves(pullback) if jnp.issubdtype(leaf.dtype, jnp.floating)]
        assert (max(leaf.shape[0] for leaf in floats if leaf.ndim) < EDGES / 4) == (implementation == "chunked")
    rtol, atol = (1e-4, 1e-4) if dtype == "float32" else (0.02, 0.5)
    for one, other in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, other, rtol, atol)


def test_parts_of_the_first_product_that_cancel_are_float32() -> None:
    """Points far from the origin: differences of 0.5 beside coordinates of 1,000."""
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    x = jnp.array([[1000.0], [1000.5], [1001.0]], jnp.float16)
    weight = jnp.array([[0.0], [1.0]], jnp.float16)
    apply: Any
    for apply in (None, lambda rows: 2 * rows):
        found = graphs.edge_conv(graph, x, weight, apply=apply)
        factor = 1 if apply is None else 2
        assert found.dtype == jnp.float16
        assert found.ravel().tolist() == [factor, -0.5 * factor, -0.5 * factor]


def test_modules_that_change_their_state_are_applied_to_all_edges() -> None:
    graph = graphs.from_edges(ENDS[0], ENDS[1], NODES)
    norm = nnx.BatchNorm(8, rngs=nnx.Rngs(0))
    layer = graphs.EdgeConv(5, 8, norm, implementation="xla", rngs=nnx.Rngs(0))
    x = jnp.ones((NODES, 5))

    @nnx.jit
    def run(layer: Any) -> jax.Array:
        return jax.tree.leaves(nnx.value_and_grad(lambda layer: layer(graph, x).sum())(layer))[0]

    run(layer)
    assert bool((norm.mean[...] != 0).any())


@pytest.mark.full
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("aggregator", ["max", "mean"])
def test_clouds_are_edge_convolutions_of_their_nearest_points(implementation: str, aggregator: str) -> None:
    rngs = nnx.Rngs(0)
    layer = graphs.DynamicEdgeConv(
        3, 8, network(), k=4, aggregator=aggregator, implementation=implementation, rngs=rngs
    )
    found = jax.jit(lambda x: layer(x, MASK))(POINTS)
    for cloud, is_point, result in zip(POINTS, MASK, found, strict=True):
        points = cloud[is_point]
        assert layer.bias is not None
        graph = graphs.knn_graph(points, 4)
        conv = functools.partial(graphs.edge_conv, aggregator=aggregator, implementation="xla")
        wanted = jax.jit(conv, static_argnums=4)(graph, points, layer.weight[...], layer.bias[...], network())
        np.testing.assert_allclose(result[is_point], wanted, rtol=1e-5, atol=1e-5)
        assert not result[~is_point].any()


def test_nearest_points_are_those_of_a_tree_on_the_host() -> None:
    points = jnp.asarray(RANDOM.normal(size=(700, 3)) + 100, jnp.float32)  # more than are compared at a time
    found = jax.jit(lambda points: graphs.nearest_points(points, 5))(points)
    graph = graphs.knn_graph(points, 5)
    exact = np.asarray(graph.senders).reshape(700, 5)
    assert (np.sort(found, 1) == np.sort(exact, 1)).mean() > 0.999  # but for distances that float32 cannot tell apart
    assert (found[:, 0] == jnp.arange(700)).all()
    assert graphs.nearest_points(POINTS, 20).shape == (2, 12, 12)


@pytest.mark.full
def test_a_dynamic_layer_under_autocast_has_gradients_in_half_precision_within_eps() -> None:
    layer = graphs.DynamicEdgeConv(3, 8, network(), k=4, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    x = POINTS.astype(jnp.float16).astype(jnp.float32)

    def loss(state: Any, x: jax.Array) -> jax.Array:
        return (nnx.merge(definition, state)(x).astype(jnp.float32) ** 2).mean()

    wanted, found = (jax.jit(jax.grad(f, (0, 1)))(state, x) for f in (loss, jt.autocast(loss)))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert jnp.abs(one - other).max() < 0.05 * jnp.abs(other).max()


REFUSALS: dict[str, Any] = {
    "weight must be [2, 2], got shape (3, 2)": lambda: graphs.edge_conv(
        graphs.from_edges([0], [0], 1), jnp.ones((1, 1)), jnp.ones((3, 2))
    ),
    "aggregator='min' must be": lambda: graphs.EdgeConv(2, 2, aggregator="min", rngs=nnx.Rngs(0)),
    'implementation="chunked" needs sorted edges': lambda: graphs.edge_conv(
        graphs.from_edges([0], [0], 1, formats=("coo",)),
        jnp.ones((1, 1)),
        jnp.ones((2, 2)),
        apply=nnx.relu,
        implementation="chunked",
    ),
    "k=0 must be at least 1": lambda: graphs.nearest_points(POINTS, 0),
    "mask must be bool (2, 12), got bool (12,)": lambda: graphs.nearest_points(POINTS, 2, MASK[0]),
    "features must be [2, points, 2], got shape (2, 12, 3)": lambda: graphs.dynamic_edge_conv(
        POINTS, jnp.ones((4, 2)), k=2
    ),
}


def test_messages_name_the_argument() -> None:
    assert_refused(REFUSALS)
