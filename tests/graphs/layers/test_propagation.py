"""Layers of several hops: APPNP, SGC, TAG and Chebyshev's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jmp_train import graphs

pytestmark = pytest.mark.quick
RNGS = nnx.Rngs(0)
LAYERS: dict[str, Callable[[int], Any]] = {
    "appnp": lambda k: graphs.APPNPConv(k),
    "sg": lambda k: graphs.SGConv(4, 3, k, rngs=RNGS),
    "tag": lambda k: graphs.TAGConv(4, 3, k, rngs=RNGS),
    "tag expanding": lambda k: graphs.TAGConv(4, 6, k, rngs=RNGS),
    "cheb": lambda k: graphs.ChebConv(4, 3, k, rngs=RNGS),
    "cheb expanding": lambda k: graphs.ChebConv(4, 6, k, rngs=RNGS),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", LAYERS)
def test_hops_are_one_loop_whatever_their_number(name: str) -> None:
    graph, x = graphs.from_edges([0, 1, 2], [1, 2, 0], 3), jnp.ones((3, 4))

    def count(k: int) -> int:
        layer = LAYERS[name](k)
        text = str(jax.make_jaxpr(jax.grad(lambda x: layer(graph, x).sum()))(x))
        assert " scan[" in text
        return text.count("\n")

    assert abs(count(3) - count(9)) <= 2


def test_each_hop_drops_other_edges_and_the_mean_stays() -> None:
    line, x = graphs.from_edges([0, 1, 2], [1, 2, 3], 4), jnp.ones((4, 1))
    keys = jax.random.split(jax.random.key(0), 2_000)

    def run(key: jax.Array) -> jax.Array:
        return graphs.appnp_conv(line, x, 3, 0.0, norm="none", edge_dropout=0.75, dropout_key=key)[3, 0]

    reached = np.asarray(jax.jit(jax.vmap(run))(keys))
    assert set(reached.tolist()) == {0.0, 64.0}  # three edges of 4 each, dropped apart
    assert abs(reached.mean() - 1) < 5 * reached.std() / 2_000**0.5


def test_propagated_features_are_made_once() -> None:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 9, (2, 40))
    graph, x = graphs.from_edges(senders, receivers, 9), jnp.asarray(random.normal(size=(9, 4)), jnp.float32)
    w = jnp.linspace(0.5, 1, 40)
    for out in (3, 6):
        layer = graphs.SGConv(4, out, 3, allow_zero_in_degree=True, rngs=nnx.Rngs(0))
        propagated = layer.propagate(graph, x, w)
        np.testing.assert_allclose(layer(None, propagated), layer(graph, x, w), rtol=1e-5, atol=1e-6)
    strict = graphs.SGConv(4, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match="some nodes have no incoming edges, so their"):
        strict.propagate(graphs.from_edges([0], [1], 2), x[:2])


def test_eigenvalues_may_be_those_of_each_graph_of_a_batch() -> None:
    pair = graphs.from_edges([0, 1], [1, 0], 2)
    layer, x = graphs.ChebConv(1, 1, 4, rngs=nnx.Rngs(0)), jnp.array([[1.0], [3.0]])
    both = graphs.batch([pair, pair])

    def results(x: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
        found = layer(both, jnp.concatenate([x, x]), lambda_max=jnp.array([1.5, 1.5, 2, 2]))
        return found, [layer(pair, x, lambda_max=value) for value in (1.5, 2.0)]

    found, wanted = jax.jit(results)(x)
    np.testing.assert_allclose(found, np.concatenate(wanted), rtol=1e-6)


def test_a_block_cannot_send_again() -> None:
    block = graphs.Block(graphs.from_edges([0], [0], 1).connections)
    graph: Any = block
    with pytest.raises(TypeError, match="several hops need a Graph, got a Block"):
        graphs.propagate(graph, jnp.ones((1, 1)), 2)
