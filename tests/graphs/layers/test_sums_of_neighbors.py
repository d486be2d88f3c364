"""Layers are their published formulas, written in float64 with dense incidences; over several features at once."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES
from layer_cases import CASES, draw_inputs, in_float64, layer_call, parameters, small_graph, weights_of

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs.layers.sage import lstm_aggregate

pytestmark = [pytest.mark.newest, pytest.mark.quick]


def test_the_product_comes_first_where_it_makes_features_narrower() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    for width, out in ((8, 2), (2, 8), (4, 4)):
        x, weight = jnp.ones((3, width)), jnp.ones((width, out))
        text = str(jax.make_jaxpr(graphs.graph_conv)(graph, x, weight))
        (summed,) = re.findall(r"f32\[3,(\d)\] = scatter-add", text)
        assert int(summed) == min(width, out)


@pytest.mark.full
def test_the_activations_result_is_stored_in_half_under_autocast() -> None:
    layer = graphs.GraphConv(2, 3, activation=nnx.elu, rngs=nnx.Rngs(0))
    graph = graphs.from_edges([0, 1], [1, 0], 2)
    run = jt.autocast(lambda x: layer(graph, x))
    assert run(jnp.ones((2, 2))).dtype == jnp.float16


def test_edge_weights_of_another_dtype_do_not_decide_the_results() -> None:
    graph = graphs.from_edges([0, 1, 1], [1, 0, 0], 2)
    x, w = jnp.ones((2, 2), jnp.float16), jnp.array([1 / 3, 2048.25, -2048])
    result = graphs.graph_conv(graph, x, norm="none", edge_weight=w)
    assert result.dtype == jnp.float16
    np.testing.assert_array_equal(result[:, 0], jnp.asarray([0.25, 1 / 3], jnp.float16))


@pytest.mark.full
def test_eps_is_a_parameter_only_if_it_is_learned() -> None:
    graph, x = graphs.from_edges([0], [1], 2), jnp.array([2.0, 3.0])
    fixed = graphs.GINConv(init_eps=0.5)
    assert not jax.tree.leaves(nnx.state(fixed))
    learned = graphs.GINConv(init_eps=0.5, learn_eps=True, param_dtype=jnp.bfloat16)
    (eps,) = jax.tree.leaves(nnx.state(learned, nnx.Param))
    assert (eps.shape, eps.dtype) == ((1,), jnp.bfloat16)
    for layer in (fixed, learned):
        assert layer(graph, x).tolist() == [3.0, 6.5]
    gradient = nnx.grad(lambda layer: layer(graph, x).sum())(learned)
    assert gradient["eps"][...].tolist() == [5.0]


def test_networks_and_functions_are_applied_before_the_activation() -> None:
    graph, x = graphs.from_edges([0, 1], [1, 0], 2), jnp.ones((2, 3))
    network = nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), nnx.relu, nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    layer = graphs.GINConv(network, activation=jnp.tanh)
    np.testing.assert_allclose(*jax.jit(lambda x: (layer(graph, x), jnp.tanh(network(2 * x))))(x), rtol=1e-6)
    assert len(jax.tree.leaves(nnx.state(layer, nnx.Param))) == 4
    assert graphs.GINConv(lambda x: -x)(graph, x).tolist() == [[-2.0] * 3] * 2


def test_features_of_any_rank() -> None:
    graph, x = graphs.from_edges([0, 1, 1], [1, 0, 0], 2), jnp.arange(12.0).reshape(2, 3, 2)
    w = jnp.array([1.0, 2.0, -1.0])
    found = graphs.gin_conv(graph, x, edge_weight=w)
    np.testing.assert_array_equal(found, x + x[::-1])


@pytest.mark.full
@pytest.mark.parametrize("half", HALVES)
def test_an_lstm_that_forgets_slowly_counts_beyond_2048(half: str) -> None:
    """The cell adds 1/4096 a step; in half it would stop growing at a fraction of the result."""
    count = 3_000
    graph = graphs.from_edges([0] * count, [1] * count, 2)
    bias = jnp.asarray([20, 20, np.arctanh(2.0**-12), 0], half)
    zeros = jnp.zeros((1, 4), half)
    x = jnp.zeros((2, 1), half)
    result = lstm_aggregate(graph, x, [zeros, zeros, bias, 0 * bias])
    assert result.dtype == half
    wanted = 0.5 * np.tanh(count * np.tanh(float(bias[2])))
    assert float(result[1, 0]) == pytest.approx(wanted, rel=2 * float(jnp.finfo(half).eps))


def test_the_lstm_needs_mailboxes_under_jit() -> None:
    layer = graphs.SAGEConv(2, 2, aggregator="lstm", rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r'formats=\("mailbox",\)'):
        jax.jit(layer)(graphs.from_edges([0], [1], 2), jnp.ones((2, 2)))
    graph = graphs.from_edges([0], [1], 2, formats=("mailbox",))
    assert jax.jit(layer)(graph, jnp.ones((2, 2))).shape == (2, 2)


@pytest.mark.parametrize("aggregator", ["mean", "gcn", "pool", "lstm"])
def test_graphs_without_edges(aggregator: str) -> None:
    layer = graphs.SAGEConv(2, 3, aggregator=aggregator, rngs=nnx.Rngs(0))
    graph, x = graphs.from_edges([], [], 4), np.ones((4, 2), np.float32)
    result = jax.jit(lambda x: layer(graph, x))(x)
    own = layer.weight if layer.self_weight is None else layer.self_weight
    assert layer.bias is not None
    np.testing.assert_allclose(result, x @ np.asarray(own[...]) + np.asarray(layer.bias[...]), rtol=1e-6)


def test_the_norm_comes_after_the_activation() -> None:
    graph, x = graphs.from_edges([0, 1], [1, 0], 2), -np.ones((2, 3), np.float32)
    layer = graphs.SAGEConv(3, 4, activation=nnx.relu, norm=nnx.LayerNorm(4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
    bare = graphs.SAGEConv(3, 4, rngs=nnx.Rngs(0))
    norm = layer.norm
    assert norm is not None
    found, wanted = jax.jit(lambda x: (layer(graph, x), norm(nnx.relu(bare(graph, x)))))(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5)
    assert nnx.state(layer)["norm"]


QUICK = (
    *("graph both expanding, weighted", "sage lstm, weighted", "gat residual, weighted", "gatv2 residual, weighted"),
    *("gin max", "tag, weighted", "cheb", "relational bdd, weighted", "transformer gated, mean of heads"),
    *("edge network", "pna"),
)


@pytest.mark.parametrize("name", [x if x in QUICK else pytest.param(x, marks=pytest.mark.full) for x in CASES])
def test_layers_are_their_formulas(name: str) -> None:
    case = CASES[name]
    graph, edges, count = small_graph()
    _, state = parameters(case.make(rngs=nnx.Rngs(0)))
    x, w = draw_inputs(case, count, edges, "float32")
    batch = jnp.stack([x, -x, 2 * x])
    found = jax.jit(jax.vmap(layer_call(case, graph), (None, 0, None)))(state, batch, w)
    for x, result in zip(np.asarray(batch, np.float64), found, strict=True):
        wanted = case.exact(np, in_float64(state), edges, x, weights_of(w, edges))
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-5)
