"""Layers of several hops: APPNP, SGC, TAG and Chebyshev's."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES

import jmp_train as jt
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


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])
def test_a_hop_is_rounded_once_and_nothing_overflows_before(half: str, is_cast: bool) -> None:
    """Ten neighbors of 10,000, whose sum float16 cannot hold, and a tenth of a node's own 1,000."""
    star = graphs.from_edges([*range(1, 11), 0], [0] * 10 + [1], 12)
    x = jnp.full((12, 2), 1e4, half if is_cast else jnp.float32).at[0].set(1e3)

    def conv(x: jax.Array) -> jax.Array:
        return graphs.appnp_conv(star, x, 1, norm="right")

    result = (conv if is_cast else jt.autocast(conv, half))(x)
    assert result.dtype == half
    exact = np.asarray(x.astype(half), np.float64)
    wanted = 0.9 * exact[2] + 0.1 * exact[0]
    np.testing.assert_allclose(np.asarray(result[0], float), wanted, rtol=0.5 * float(jnp.finfo(half).eps))
    assert np.asarray(result[2], float) == pytest.approx(0.1 * exact[2], rel=float(jnp.finfo(half).eps))  # no neighbor


@pytest.mark.parametrize("half", HALVES)
def test_the_gradient_of_what_each_hop_brings_back_is_added_in_float32(half: str) -> None:
    """A node without neighbors gets alpha times its own, of the last hop only; one with a self-loop of all hops."""
    loop, k, alpha = graphs.from_edges([0], [0], 1), 300, 2.0**-6
    gradient = jax.grad(lambda x: graphs.appnp_conv(loop, x, k, alpha).sum(dtype=jnp.float32))(jnp.ones((1, 1), half))
    assert float(gradient[0, 0]) == pytest.approx(1, rel=0.02)


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


@pytest.mark.parametrize(
    "name", ["tag", *(pytest.param(x, marks=pytest.mark.full) for x in ("appnp", "cheb expanding"))]
)
def test_chunks_of_sorted_edges_give_the_same(name: str) -> None:
    random = np.random.default_rng(0)
    senders, receivers = random.integers(0, 12, (2, 300))
    layer, x = LAYERS[name](3), jnp.asarray(random.normal(size=(12, 4)), jnp.float32)

    def run(formats: tuple[str, ...]) -> Any:
        graph = graphs.from_edges(senders, receivers, 12, formats=formats)
        return jax.jit(jax.value_and_grad(lambda x: (layer(graph, x) ** 2).sum()))(x)

    for found, wanted in zip(run(("csr",)), run(("coo",)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_each_hop_drops_other_edges_and_the_mean_stays() -> None:
    line, x = graphs.from_edges([0, 1, 2], [1, 2, 3], 4), jnp.ones((4, 1))
    keys = jax.random.split(jax.random.key(0), 2_000)

    def run(key: jax.Array) -> jax.Array:
        return graphs.appnp_conv(line, x, 3, 0.0, norm="none", edge_dropout=0.5, dropout_key=key)[3, 0]

    reached = np.asarray(jax.jit(jax.vmap(run))(keys))
    assert set(reached.tolist()) == {0.0, 8.0}  # three edges of 2 each, dropped apart
    assert abs(reached.mean() - 1) < 5 * reached.std() / 2_000**0.5
    with pytest.raises(ValueError, match=r'the graph was made with formats=\("csr",\), which'):
        lean = graphs.from_edges([0], [1], 2, formats=("csr",))
        graphs.appnp_conv(lean, x[:2], edge_dropout=0.5, dropout_key=keys[0])


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
    found = layer(both, jnp.concatenate([x, x]), lambda_max=jnp.array([1.5, 1.5, 2, 2]))
    wanted = [layer(pair, x, lambda_max=value) for value in (1.5, 2.0)]
    np.testing.assert_allclose(found, jnp.concatenate(wanted), rtol=1e-6)


def test_a_block_cannot_send_again() -> None:
    block = graphs.Block(graphs.from_edges([0], [0], 1).connections)
    graph: Any = block
    with pytest.raises(TypeError, match="several hops need a Graph, got a Block"):
        graphs.propagate(graph, jnp.ones((1, 1)), 2)


def test_first_weights_of_tag_are_normal_with_glorots_variance_and_the_gain_of_relu() -> None:
    """Two times 2 / (fan in + fan out), as in Deep Graph Library, where all hops enter."""
    layer = graphs.TAGConv(150, 100, 3, rngs=nnx.Rngs(0))
    weight = np.asarray(layer.weight[...], np.float64)
    assert weight.std() == pytest.approx((2 * 2 / (4 * 150 + 100)) ** 0.5, rel=0.02)
