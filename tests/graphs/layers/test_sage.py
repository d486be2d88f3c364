import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES

from jmp_train import graphs
from jmp_train.graphs.layers.sage import lstm_aggregate

pytestmark = pytest.mark.quick


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
