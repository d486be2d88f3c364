import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = pytest.mark.quick


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
