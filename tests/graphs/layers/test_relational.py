"""Layers of edges' types and features: what they are told of the edges, hubs, and what is wrong with it."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES
from pytrees import compiled_vjp
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = [pytest.mark.quick, pytest.mark.newest]

COUNT = 13_161


def star() -> graphs.Graph:
    """A hub that so many neighbors send to, by edges of three types."""
    return graphs.from_edges(range(1, COUNT + 1), [0] * COUNT, COUNT + 1)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_hub_is_rounded_once_and_so_are_gradients_of_what_all_edges_share(
    implementation: str, half: str, is_cast: bool
) -> None:
    graph, types = star(), np.zeros(COUNT, int)
    dtype = half if is_cast else "float32"
    ones = jnp.ones((COUNT + 1, 1), dtype), jnp.ones((1, 1, 1), dtype), jnp.ones((2, 1), dtype)

    def conv(x: jax.Array, weight: jax.Array, coefficients: jax.Array) -> jax.Array:
        run = graphs.rel_graph_conv
        if not is_cast:
            run = jt.autocast(run, half)
        result = run(graph, x, types, weight, coefficients, implementation=implementation)
        assert result.dtype == half
        return result[0, 0].astype(jnp.float32)

    found, grads = jax.jit(jax.value_and_grad(conv, (1, 2)))(*ones)
    rounded = float(jnp.asarray(COUNT, half))
    assert float(found) == rounded
    exact = rounded if is_cast else COUNT  # gradients of float32 weights are not rounded
    assert [x.ravel().tolist() for x in grads] == [[exact], [exact, 0]]


def test_edges_of_no_type_bring_nothing_under_jit() -> None:
    graph = graphs.from_edges([0, 1, 2, 0], [2, 2, 2, 1], 3)
    x, weight = jnp.array([[1.0], [2.0], [4.0]]), jnp.array([[[10.0]], [[100.0]]])

    def both(types: Any) -> list[jax.Array]:
        matrices = weight, weight[:, None]
        return [graphs.rel_graph_conv(graph, x, types, each, implementation="xla") for each in matrices]

    for found in jax.jit(both)(jnp.array([0, 2, -1, 1], jnp.int8)):
        assert found.ravel().tolist() == [0, 100, 10]
    refusals = {
        "edge_types[1] = 2 is out of range for 2 types": lambda: both(np.array([0, 2, 0, 1])),
        "edge_types[3] = -1 is out of range for 2 types": lambda: both([0, 1, 0, -1]),
        "edge_types[2] = 4294967296 is out of range": lambda: both(np.array([0, 1, 2**32, 0])),
    }
    assert_refused(refusals)


def test_without_edges_and_without_nodes() -> None:
    for count in (0, 3):
        graph, x = graphs.from_edges([], [], count), jnp.ones((count, 2))

        @jax.jit
        def run(graph: graphs.Graph, x: jax.Array) -> list[jax.Array]:
            return [
                *(graphs.rel_graph_conv(graph, x, [], jnp.ones((2, 2, 4)), implementation=n) for n in IMPLEMENTATIONS),
                graphs.transformer_conv(graph, x, *[jnp.ones((2, 4))] * 3, num_heads=2),
            ]

        for found in run(graph, x):
            assert found.shape == (count, 4) and not np.asarray(found).any()


def test_relation_norm_makes_means_of_each_type() -> None:
    senders, receivers, types = np.array([0, 1, 2, 0, 1]), np.array([2, 2, 2, 1, 2]), np.array([0, 1, 1, 1, 1])
    graph = graphs.from_edges(senders, receivers, 3)
    norm = graphs.relation_norm(graph, types)
    np.testing.assert_allclose(norm, [1, 1 / 3, 1 / 3, 1, 1 / 3], rtol=1e-7)
    padded = graphs.pad(graph, 5, 8)
    np.testing.assert_allclose(graphs.relation_norm(padded, np.append(types, [0, 0, 0])), [*norm, 1, 1, 1])
    with pytest.raises(TypeError, match="graph and edge_types are traced: call relation_norm outside of jit"):
        jax.jit(lambda types: graphs.relation_norm(graph, types))(types)


@pytest.mark.full
def test_dropout_and_norm_of_the_relational_layer() -> None:
    graph, x = graphs.from_edges([0, 1, 2], [1, 2, 0], 3), jnp.ones((3, 4))
    rngs = nnx.Rngs(0)
    layer = graphs.RelGraphConv(4, 8, 2, dropout_rate=0.5, norm=nnx.LayerNorm(8, rngs=rngs), rngs=rngs)
    types = jnp.array([0, 1, 0])
    assert (np.asarray(layer(graph, x, types)) == 0).any()
    layer.eval()
    assert layer.self_weight is not None
    still = np.asarray(layer(graph, x, types) - x @ layer.self_weight[...])
    np.testing.assert_allclose(still.mean(1), 0, atol=1e-6)


@pytest.mark.full
def test_states_are_told_of_weights_and_one_type_needs_no_types() -> None:
    graph, x = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3), jnp.arange(12.0).reshape(3, 4) / 12
    layer = graphs.GatedGraphConv(4, 5, 2, rngs=nnx.Rngs(0))
    layer.message_bias = nnx.Param(jnp.linspace(-1, 1, 5)[None])
    weights = jnp.array([0.5, 2.0, 0.0, 1.0])

    def both(x: jax.Array, weights: jax.Array) -> list[jax.Array]:
        fewer = graphs.from_edges([0, 1, 1, 0], [1, 2, 2, 0], 3)  # a weight of 2 is an edge twice, one of 0 none
        halved = jnp.array([0.5, 1.0, 1.0, 1.0])
        calls = [(graph, x, None, weights), (graph, x, jnp.zeros(4, int), weights), (fewer, x, None, halved)]
        return [layer(*call) for call in calls]

    first, *others = jax.jit(both)(x, weights)
    for found in others:
        np.testing.assert_allclose(found, first, rtol=1e-5, atol=1e-6)


def plain(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> Any:
    graph = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3)
    return function(graph, *map(jnp.ones, shapes), **options)


def rel(**options: Any) -> Any:
    arguments = {"edge_types": [0, 1, 0, 1], "weight": jnp.ones((2, 4, 6))} | options
    return plain(graphs.rel_graph_conv, (3, 4), **arguments)


def network(**options: Any) -> Any:
    arguments = {"network": lambda k, rows: rows @ k, "network_params": jnp.ones((2, 8)), "out_features": 2} | options
    return plain(graphs.nn_conv, (3, 4), (4, 2), **arguments)


def gated(**options: Any) -> Any:
    gru = [jnp.ones(shape) for shape in ((4, 12), (4, 12), (12,), (12,))]
    arguments = {"weight": jnp.ones((1, 4, 4)), "gru_weights": gru, "num_steps": 2} | options
    return plain(graphs.gated_graph_conv, (3, 4), **arguments)


def attend(**options: Any) -> Any:
    return plain(graphs.transformer_conv, (3, 4), *[(4, 6)] * 3, **({"num_heads": 2} | options))


RNGS = nnx.Rngs(0)
REFUSALS: dict[str, Any] = {
    "TypeError: edge_types must be integers, got float32": lambda: rel(edge_types=jnp.ones(4)),
    "edge_types must be [4], got shape (2,)": lambda: rel(edge_types=[0, 1]),
    "weight must be [types or bases, in, out], got shape (4, 6)": lambda: rel(weight=jnp.ones((4, 6))),
    "coefficients must be [types, 2], got shape (5, 3)": lambda: rel(coefficients=jnp.ones((5, 3))),
    "coefficients need a weight": lambda: rel(weight=jnp.ones((2, 2, 2, 3)), coefficients=jnp.ones((2, 2))),
    "edge_weight must be [4], got shape (3,)": lambda: rel(edge_weight=jnp.ones(3)),
    "dropout_rate=0.5 needs a random key": lambda: rel(dropout_rate=0.5),
    "implementation='cuda' must be None or one of": lambda: rel(implementation="cuda"),
    "regularizer='svd' must be one of 'none', 'basis', 'bdd'": lambda: graphs.RelGraphConv(
        4, 6, 2, regularizer="svd", rngs=RNGS
    ),
    "num_bases=4 blocks must divide in_features=4 and out_features=6": lambda: graphs.RelGraphConv(
        4, 6, 2, regularizer="bdd", num_bases=4, rngs=RNGS
    ),
    "num_types=0 and num_bases=None must be": lambda: graphs.RelGraphConv(4, 6, 0, rngs=RNGS),
    "TypeError: edge_types must be integers, got float64": lambda: plain(graphs.relation_norm, edge_types=np.ones(4)),
    "network must return [edges, 4 * 3] for edge features, got (2, 8)": lambda: network(out_features=3),
    "edge_features must be [4, width], got shape (3, 2)": lambda: plain(
        graphs.nn_conv, (3, 4), (3, 2), network=None, network_params=(), out_features=2
    ),
    "aggregator='min' must be one of 'sum', 'mean', 'max'": lambda: network(aggregator="min"),
    "TypeError: network_params must be floats, got int32": lambda: network(network_params=jnp.ones((2, 8), int)),
    "TypeError: network must have no state other than parameters": lambda: graphs.NNConv(
        4, 2, nnx.BatchNorm(8, rngs=RNGS), rngs=RNGS
    ),
    "num_steps=0 must be positive": lambda: gated(num_steps=0),
    "features of width 5 must be at most as wide as the states, 4": lambda: plain(
        graphs.gated_graph_conv, (3, 5), weight=jnp.ones((1, 4, 4)), gru_weights=[], num_steps=1
    ),
    "gru_weights must be 4 arrays, got 0": lambda: gated(gru_weights=[]),
    "weight must be [2, types, width, 4], got shape (3, 1, 4, 4)": lambda: gated(weight=jnp.ones((3, 1, 4, 4))),
    "weight must be [types, width, 3], got shape (1, 3, 4)": lambda: gated(weight=jnp.ones((1, 3, 4))),
    "weight has 2 types: edge_types are needed": lambda: gated(weight=jnp.ones((2, 4, 4))),
    "in_features=5 must be at most out_features=4": lambda: graphs.GatedGraphConv(5, 4, 2, rngs=RNGS),
    "num_heads=4 must divide the width of query_weight, 6": lambda: attend(num_heads=4),
    "edge_features and edge_feature_weight need each other": lambda: attend(edge_features=jnp.ones((4, 2))),
    "edge_feature_weight must be [2, 6], got shape (3, 6)": lambda: attend(
        edge_features=jnp.ones((4, 2)), edge_feature_weight=jnp.ones((3, 6))
    ),
    "self_bias and gate_weight need": lambda: attend(gate_weight=jnp.ones((18, 1))),
    "use_gate=True needs use_self_weight=True": lambda: graphs.TransformerConv(
        4, 6, use_gate=True, use_self_weight=False, rngs=RNGS
    ),
    "attention_dropout=1.0 must be in [0, 1)": lambda: attend(attention_dropout=1.0),
}


def test_messages_name_the_argument_what_came_and_what_was_wanted() -> None:
    assert_refused(REFUSALS)


def test_a_graph_of_several_types_is_refused() -> None:
    block: Any = graphs.hetero_from_edges({("a", "b", "c"): ([0], [0])}, {"a": 1, "c": 1})
    with pytest.raises(TypeError, match=r"a Block or a jraph\.GraphsTuple, got HeteroGraph"):
        graphs.rel_graph_conv(block, jnp.ones((1, 1)), [0], jnp.ones((1, 1, 1)))


@pytest.mark.full
@pytest.mark.parametrize("half", ["float32", "float16"])
def test_the_largest_product_with_the_matrix_of_an_edge(half: str) -> None:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 9, (2, 60))
    receivers[receivers == 4] = 5
    graph = graphs.from_edges(senders, receivers, 9)
    x, of_edges, kernel, weight = (random.normal(size=s).astype("float32") for s in ((9, 3), (60, 2), (2, 6), (60,)))

    def network(kernel: jax.Array, rows: Any) -> jax.Array:
        return jnp.tanh(rows @ kernel)

    def exact(x: jax.Array, kernel: jax.Array, weight: jax.Array) -> jax.Array:
        matrices = network(kernel, of_edges).reshape(60, 3, 2)
        found = jax.ops.segment_max(jnp.einsum("ei,eio->eo", x[senders] * weight[:, None], matrices), receivers, 9)
        return jnp.where(jnp.isfinite(found), found, 0)

    def run(implementation: str, x: jax.Array, kernel: jax.Array, weight: jax.Array) -> jax.Array:
        conv = functools.partial(graphs.nn_conv, aggregator="max", edge_weight=weight, implementation=implementation)
        conv = conv if half == "float32" else jt.autocast(conv)
        return conv(graph, x, of_edges, network, kernel, 2)

    cotangent = np.ones((9, 2), half)
    wanted, gradients = compiled_vjp(exact, cotangent.astype("float32"), x, kernel, weight)
    bound = 1e-5 if half == "float32" else 5e-3
    for name in IMPLEMENTATIONS:
        found, others = compiled_vjp(functools.partial(run, name), cotangent, x, kernel, weight)
        assert found.dtype == half
        np.testing.assert_allclose(found, wanted, atol=bound)
        for one, other in zip(others, gradients, strict=True):
            np.testing.assert_allclose(one, other, atol=bound * np.abs(other).max())
