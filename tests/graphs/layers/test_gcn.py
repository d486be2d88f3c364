import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES

import jmp_train as jt
from jmp_train import graphs

pytestmark = [pytest.mark.quick, pytest.mark.newest]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])
def test_nothing_overflows_before_it_is_divided(half: str, is_cast: bool) -> None:
    """Ten neighbors of 10,000, whose sum float16 cannot hold."""
    star = graphs.from_edges(range(1, 11), [0] * 10, 11)
    back = graphs.from_edges([0] * 10, range(1, 11), 11)
    x = jnp.full((11, 2), 1e4, half if is_cast else jnp.float32)
    limit = 0.5 * float(jnp.finfo(half).eps)
    for graph, norm, wanted in [
        (star, "right", 1e4),
        (star, "both", 1e5 / 10**0.5),
        (back, "left", 1e3),
        (back, "both", 1e4 / 10**0.5),
    ]:

        def conv(x: jax.Array, graph: Any = graph, norm: str = norm) -> jax.Array:
            return graphs.graph_conv(graph, x, norm=norm, allow_zero_in_degree=True)

        result = (conv if is_cast else jt.autocast(conv, half))(x)
        assert result.dtype == half
        node = 0 if graph is star else 3
        np.testing.assert_allclose(np.asarray(result[node], float), wanted, rtol=limit)
    total = graphs.graph_conv(star, x.astype(half), norm="none", allow_zero_in_degree=True)
    assert bool(jnp.isinf(total[0, 0])) == (half == "float16")


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])
def test_the_biass_gradient_does_not_stagnate(half: str, is_cast: bool) -> None:
    count = 13_161
    graph = graphs.from_edges(range(count), range(count), count)
    dtype = half if is_cast else jnp.float32

    def loss(bias: jax.Array) -> jax.Array:
        def conv(bias: jax.Array) -> jax.Array:
            return graphs.graph_conv(graph, jnp.zeros((count, 1), dtype), bias=bias)

        result = (conv if is_cast else jt.autocast(conv, half))(bias)
        assert result.dtype == half
        return jnp.sum(result, dtype=jnp.float32)

    gradient = jax.jit(jax.grad(loss))(jnp.zeros(1, dtype))
    assert float(gradient[0]) == float(jnp.asarray(count, half))


def test_the_product_comes_first_where_it_makes_features_narrower() -> None:
    graph = graphs.from_edges([0, 1, 2], [1, 2, 0], 3)
    for width, out in ((8, 2), (2, 8), (4, 4)):
        x, weight = jnp.ones((3, width)), jnp.ones((width, out))
        text = str(jax.make_jaxpr(graphs.graph_conv)(graph, x, weight))
        (summed,) = re.findall(r"f32\[3,(\d)\] = scatter-add", text)
        assert int(summed) == min(width, out)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("norm", ["both", "right", "left", "none"])
def test_against_a_dense_adjacency(norm: str) -> None:
    """As in Kipf's and Welling's paper, with self-loops and multiple edges."""
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 8, (2, 40))
    senders, receivers = np.append(senders, np.arange(8)), np.append(receivers, np.arange(8))
    weights = random.uniform(size=48).astype(np.float32)
    x = random.normal(size=(8, 3)).astype(np.float32)
    weight = random.normal(size=(3, 5)).astype(np.float32)
    counts, adjacency = np.zeros((2, 8, 8))
    np.add.at(counts, (receivers, senders), 1)
    np.add.at(adjacency, (receivers, senders), weights)
    into, out = np.diag(1 / counts.sum(1)), np.diag(1 / counts.sum(0))
    scaled = {
        "both": into**0.5 @ adjacency @ out**0.5,
        "right": into @ adjacency,
        "left": adjacency @ out,
        "none": adjacency,
    }[norm]
    wanted = np.maximum(scaled @ x @ weight + 0.5, 0)
    graph = graphs.from_edges(senders, receivers, 8)
    found = graphs.graph_conv(
        graph, x, weight, jnp.full(5, 0.5), norm=norm, edge_weight=weights, activation=jax.nn.relu
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_parameters_are_drawn_as_in_dgl() -> None:
    layer = graphs.GraphConv(300, 200, rngs=nnx.Rngs(0))
    assert layer.weight is not None and layer.bias is not None
    bound = (6 / 500) ** 0.5
    assert 0.99 * bound < jnp.abs(layer.weight[...]).max() <= bound
    assert float(layer.weight[...].std()) == pytest.approx(bound / 3**0.5, rel=0.02)
    assert layer.bias.shape == (200,) and not layer.bias[...].any()
    bare = graphs.GraphConv(3, 3, use_weight=False, use_bias=False, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(bare))


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
