"""PNA, GINE, and the layers of a network joined by jumping knowledge."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from graph_helpers import HALVES
from refusals import assert_refused

import jmp_train as jt
from jmp_train import graphs

pytestmark = pytest.mark.quick


def pna(graph: Any, x: jax.Array, aggregator: str, scaler: str = "identity") -> jax.Array:
    """Returns one reduction of the neighbors' own numbers."""
    pre = jnp.array([[[0.0], [1.0]]], x.dtype)
    post = jnp.array([[[0.0], [1.0]]], x.dtype)
    options: Any = {"aggregators": [aggregator], "scalers": [scaler], "delta": 2.0}
    return graphs.pna_conv(graph, x[:, None], pre, post, jnp.ones((1, 1), x.dtype), **options)[:, 0]


@pytest.mark.parametrize("half", HALVES)
def test_a_standard_deviation_in_half_does_not_cancel(half: str) -> None:
    graph = graphs.from_edges([0, 1], [2, 2], 3)
    x = jnp.array([30, 30.25, 0], half)
    std, var = jax.jit(lambda x: [pna(graph, x, name) for name in ("std", "var")])(x)
    assert (std.tolist(), var.tolist()) == ([0, 0, 0.125], [0, 0, 0.015625])


def test_scalers_are_of_the_degrees_of_hubs_in_float32() -> None:
    count = 70_000  # float16 has no such degree
    graph = graphs.from_edges(range(1, count + 1), [0] * count, count + 1, formats=("csr",))
    x = jnp.ones(count + 1, jnp.float16)
    log = np.log1p(count)
    both = jax.jit(lambda x: [pna(graph, x, "mean", scaler) for scaler in ("amplification", "attenuation")])(x)
    for found, wanted in zip(both, (log / 2, 2 / log), strict=True):
        assert float(found[0]) == pytest.approx(wanted, rel=1e-3)
        assert not found[1:].any()  # nodes without neighbors have nothing to scale


@pytest.mark.full
def test_a_blocks_targets_are_the_first_of_its_sources() -> None:
    senders, receivers = np.array([0, 2, 3, 1]), np.array([0, 0, 1, 1])
    block = graphs.Block(graphs.from_edges(senders, receivers, 4).connections)
    layer = graphs.PNAConv(3, 4, delta=1.0, rngs=nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
    whole = graphs.from_edges(senders, receivers, 4)
    np.testing.assert_allclose(*jax.jit(lambda x: [layer(graph, x) for graph in (block, whole)])(x), rtol=1e-6)
    edges = jnp.ones((4, 2))
    of_edges = graphs.PNAConv(3, 4, delta=1.0, edge_features=2, rngs=nnx.Rngs(0))
    both = jax.jit(lambda x: [of_edges(graph, x, edges) for graph in (block, whole)])(x)
    np.testing.assert_allclose(*both, rtol=1e-6)


def test_layers_are_joined_side_by_side_by_their_largest_or_by_attention() -> None:
    layers = [jnp.array([[1.0, 5.0]], jnp.float16), jnp.array([[2.0, 3.0]], jnp.float16)]
    lstm = graphs.JumpingKnowledge("lstm", 2, 2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    ways = (graphs.jumping_knowledge, lambda layers: graphs.jumping_knowledge(layers, "max"), lstm)
    joined, largest, found = jax.jit(lambda layers: [way(layers) for way in ways])(layers)
    assert (joined.tolist(), largest.tolist()) == ([[1, 5, 2, 3]], [[2, 5]])
    assert found.dtype == jnp.float16
    assert (found >= jnp.stack(layers).min(0)).all() and (found <= jnp.stack(layers).max(0)).all()
    whole = graphs.JumpingKnowledge("lstm", 2, 2, rngs=nnx.Rngs(0))
    half = jax.jit(jt.autocast(lambda layers: whole(layers)))([x.astype("float32") for x in layers])
    np.testing.assert_allclose(half, found, rtol=2e-3)


X, GRAPH = jnp.ones((3, 2)), graphs.from_edges([0, 1, 2, 0], [1, 2, 0, 0], 3)
REFUSALS: dict[str, Any] = {
    "aggregators[1]='median' must be one of 'mean', 'max'": lambda: graphs.PNAConv(
        2, 2, delta=1.0, aggregators=["mean", "median"], rngs=nnx.Rngs(0)
    ),
    "scalers must be at least one of 'identity', .* got []": lambda: graphs.PNAConv(
        2, 2, delta=1.0, scalers=[], rngs=nnx.Rngs(0)
    ),
    "towers=2 must divide out_features=5": lambda: graphs.PNAConv(2, 5, delta=1.0, towers=2, rngs=nnx.Rngs(0)),
    "delta=0.0 must be positive": lambda: graphs.PNAConv(2, 2, delta=0.0, rngs=nnx.Rngs(0))(GRAPH, X),
    "delta=inf must be positive": lambda: graphs.PNAConv(2, 2, delta=np.inf, rngs=nnx.Rngs(0))(GRAPH, X),
    "pre_weight must be [towers, 4, width], got shape (1, 7, 2)": lambda: graphs.PNAConv(
        2, 2, delta=1.0, edge_features=3, rngs=nnx.Rngs(0)
    )(GRAPH, X),
    "edge_features must be [4, 2], got shape (4, 3)": lambda: graphs.gine_conv(GRAPH, X, jnp.ones((4, 3))),
    "eps must be a number": lambda: graphs.gine_conv(GRAPH, X, jnp.ones((4, 2)), eps=jnp.ones(2)),
    "mode='sum' must be one of 'cat', 'max', 'lstm'": lambda: graphs.JumpingKnowledge("sum"),
    "layers[1] must be [3, 2], got shape (3, 4)": lambda: graphs.jumping_knowledge([X, jnp.ones((3, 4))], "max"),
    "mode='lstm' takes weights": lambda: graphs.jumping_knowledge([X], "lstm"),
    "layers is empty: at least one is needed": lambda: graphs.jumping_knowledge([]),
    'mode="lstm" needs features=2, num_layers=None': lambda: graphs.JumpingKnowledge("lstm", 2),
}


def test_messages_name_the_argument() -> None:
    assert_refused(REFUSALS)
