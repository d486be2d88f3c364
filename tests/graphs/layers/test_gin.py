import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES

import jmp_train as jt
from jmp_train import graphs

pytestmark = pytest.mark.quick


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])
def test_a_hub_is_rounded_once(half: str, is_cast: bool) -> None:
    """13,161 neighbors of 1 and the node's own 30, one and a half times."""
    count = 13_161
    graph = graphs.from_edges(range(1, count + 1), [0] * count, count + 1)
    x = jnp.ones(count + 1, half if is_cast else jnp.float32).at[0].set(30)

    def conv(x: jax.Array) -> jax.Array:
        return graphs.gin_conv(graph, x, eps=0.5)

    result = (conv if is_cast else jt.autocast(conv, half))(x)
    assert result.dtype == half
    assert float(result[0]) == float(jnp.asarray(count + 45, half))


@pytest.mark.parametrize("half", HALVES)
def test_what_cancels_may_be_beyond_float16(half: str) -> None:
    graph = graphs.from_edges([1, 1], [0, 0], 2)
    x = jnp.array([-40_000.0, 32_768.0], half)
    found = graphs.gin_conv(graph, x, eps=jnp.array([0.5]))[0]
    assert float(found) == float(jnp.asarray(65_536 + 1.5 * float(x[0]), half))
    mean = graphs.gin_conv(graph, x, aggregator="mean")[0]
    assert float(mean) == float(jnp.asarray(32_768 + float(x[0]), half))


def test_the_gradient_of_eps_does_not_stagnate() -> None:
    count = 13_161
    graph = graphs.from_edges(range(count), range(count), count)
    x = jnp.ones(count, jnp.bfloat16)

    def loss(eps: jax.Array) -> jax.Array:
        return graphs.gin_conv(graph, x, eps=eps).sum(dtype=jnp.float32)

    gradient = jax.jit(jax.grad(loss))(jnp.zeros(1, jnp.bfloat16))
    assert float(gradient[0]) == float(jnp.asarray(count, jnp.bfloat16))


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
    np.testing.assert_allclose(layer(graph, x), jnp.tanh(network(2 * x)), rtol=1e-6)
    assert len(jax.tree.leaves(nnx.state(layer, nnx.Param))) == 4
    assert graphs.GINConv(lambda x: -x)(graph, x).tolist() == [[-2.0] * 3] * 2


def test_features_of_any_rank() -> None:
    graph, x = graphs.from_edges([0, 1, 1], [1, 0, 0], 2), jnp.arange(12.0).reshape(2, 3, 2)
    w = jnp.array([1.0, 2.0, -1.0])
    found = graphs.gin_conv(graph, x, edge_weight=w)
    np.testing.assert_array_equal(found, x + x[::-1])
