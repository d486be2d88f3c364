"""Both kinds of graph attention."""

from collections.abc import Callable, Sequence
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


def run_in(half: str, is_cast: bool, functions: Sequence[Callable[..., jax.Array]], *arrays: Any) -> list[np.ndarray]:
    """Returns what functions make of arrays that were cast to half, or are cast by autocast, by one program."""

    def results(*arrays: jax.Array) -> list[jax.Array]:
        return [(function if is_cast else jt.autocast(function, half))(*arrays) for function in functions]

    dtype = jnp.dtype(half if is_cast else "float32")
    return [np.asarray(x) for x in jax.jit(results)(*(x.astype(dtype) for x in arrays))]


ways = pytest.mark.parametrize("is_cast", [True, False], ids=["cast", "autocast"])
halves = pytest.mark.parametrize("half", HALVES)


@pytest.mark.quick_cases(2)
@ways
@halves
def test_logits_beyond_float16_do_no_harm(half: str, is_cast: bool) -> None:
    """Four products of 300 and 300 are 360,000."""
    graph = graphs.from_edges([1, 2, 0], [0, 0, 1], 3)
    x, eye, vector = np.full((3, 4), 300.0), np.eye(4), np.full((1, 1, 4), 300.0)
    x[1] = 100
    functions = (
        lambda x, w, a: graphs.gat_conv(graph, x, w, a, a, allow_zero_in_degree=True),
        lambda x, w, a: graphs.gatv2_conv(graph, x, w, a, allow_zero_in_degree=True),
    )
    for result in run_in(half, is_cast, functions, x, eye, vector):
        assert result.dtype == half
        np.testing.assert_array_equal(result[:, 0, 0].astype(float), [300, 300, 0])


@pytest.mark.quick_cases(2)
@ways
@halves
def test_logits_differ_by_less_than_half_can_tell(half: str, is_cast: bool) -> None:
    """Logits of 2,048 + 1 + k / 8, where float16's numbers are 2 apart, and bfloat16's 16."""
    graph = graphs.from_edges([1, 2, 3, 4], [0] * 4, 5)
    x = np.zeros((5, 3))
    x[1:, 0], x[1:, 1], x[1:, 2] = 128, 1 + np.arange(4) / 8, [1, 2, 3, 4]
    vector = np.array([16.0, 1.0, 0.0]).reshape(1, 1, 3)
    weights = np.exp(np.arange(4) / 8)
    wanted = (weights * x[1:, 2]).sum() / weights.sum()

    def gat(x: Any, w: Any, a: Any) -> jax.Array:
        return graphs.gat_conv(graph, x, w, a, 0 * a, allow_zero_in_degree=True)

    def gatv2(x: Any, w: Any, a: Any) -> jax.Array:
        return graphs.gatv2_conv(graph, x, w, a, 0 * w, allow_zero_in_degree=True)

    for result in run_in(half, is_cast, (gat, gatv2), x, np.eye(3), vector):
        error = abs(float(result[0, 0, 2]) - wanted)
        assert error <= float(jnp.finfo(half).eps) * wanted


def test_gat_is_static_where_gatv2_is_not() -> None:
    """The order of the neighbors: the same for all receivers, or each its own."""
    graph = graphs.from_edges([0, 1, 0, 1], [2, 2, 3, 3], 4)
    x = np.array([[1], [-1], [3], [-3]], np.float32)
    one, vector, both = (np.array(row, np.float32) for row in ([[1]], [[[1]]], [[1, -1]]))

    def results(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        static = graphs.gat_conv(graph, x, one, vector, vector, allow_zero_in_degree=True)
        attention = np.ones((1, 1, 2), np.float32)
        return static, graphs.gatv2_conv(graph, x, both, attention, both / 2, allow_zero_in_degree=True)

    static, found = map(np.asarray, jax.jit(results)(x))
    assert (static[2:, 0, 0] > 0).all()
    assert np.sign(found[2:, 0, 0]).tolist() == [1, -1]


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("make", [graphs.GATConv, graphs.GATv2Conv], ids=["gat", "gatv2"])
def test_the_slope_and_the_activation(make: Any) -> None:
    graph = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3)
    x = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    several = ({}, {"activation": nnx.elu}, {"negative_slope": 0.2}, {"negative_slope": 1.0})
    layers = [make(4, 3, 2, **options, rngs=nnx.Rngs(0)) for options in several]

    @jax.jit
    def results(x: jax.Array) -> list[jax.Array]:
        plain, *others = (layer(graph, x) for layer in layers)
        return [plain, nnx.elu(plain), *others]

    plain, elu, active, published, steep = map(np.asarray, results(x))
    np.testing.assert_allclose(active, elu, rtol=1e-6)
    np.testing.assert_array_equal(published, plain)
    assert (np.abs(steep[0] - plain[0]) > 1e-4).any()
    np.testing.assert_allclose(steep[1:], plain[1:], rtol=1e-6)


def test_logits_are_float32_under_autocast_and_tables_are_half() -> None:
    graph = graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3)
    layer = graphs.GATConv(4, 3, 2, rngs=nnx.Rngs(0))
    definition, state = nnx.split(layer)
    run = jt.autocast(lambda state, x: nnx.merge(definition, state)(graph, x))
    text = str(jax.make_jaxpr(run)(state, jnp.ones((3, 4))))
    assert "f16[3,2,3]" in text and "f32[3,2]" in text
    assert "f16[3,2]" not in text and "f16[4,2]" not in text


def test_kept_weights_are_not_normalized_again() -> None:
    """As in DGL: a node all of whose edges are dropped gets nothing."""
    graph = graphs.from_edges([0, 1], [1, 0], 2)
    zero = np.zeros((1, 8, 1), np.float32)

    def run(x: jax.Array) -> jax.Array:
        key = jax.random.key(0)
        return graphs.gat_conv(graph, x, jnp.ones((1, 8)), zero, zero, attention_dropout=0.75, dropout_key=key)

    assert set(np.unique(jax.jit(run)(np.ones((2, 1), np.float32)))) == {0.0, 4.0}
