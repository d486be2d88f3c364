"""Dropout: the share that is dropped, the same mask forward and backward, and by every implementation."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from promotion import promoting

import jmp_train as jt
from jmp_train import graphs
from jmp_train.graphs.kernels.implementations import IMPLEMENTATIONS

pytestmark = pytest.mark.gpu
NODES, HEADS, RATE = 400, 2, 0.4


def run_attention(implementation: str, features: jax.Array, key: jax.Array) -> jax.Array:
    """Returns attention along one edge into each node, whose weight is 1: what is left is the dropout's factor."""
    nodes = np.arange(NODES)
    graph = graphs.from_edges(np.roll(nodes, 1), nodes, NODES)
    zeros = jnp.zeros((NODES, HEADS))
    attend = functools.partial(graphs.gat_attention, implementation=implementation)
    return attend(graph, features, zeros, zeros, dropout_rate=RATE, dropout_key=key)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_attention_drops_the_same_edges_forward_and_backward(dtype: str) -> None:
    """Of 800 weights 320 are dropped, 14 more or less by a binomial's standard deviation; five of these are allowed."""
    features = jnp.ones((NODES, HEADS, 1), dtype)
    masks = []
    for implementation in IMPLEMENTATIONS:

        def both(features: jax.Array, key: jax.Array, implementation: str = implementation) -> Any:
            result, pullback = jax.vjp(functools.partial(run_attention, implementation, key=key), features)
            return result, pullback(jnp.ones_like(result))[0]

        result, gradient = jax.jit(both)(features, jax.random.key(0))
        kept = np.asarray(result, np.float32)[..., 0]
        scale = np.float32(np.asarray(jnp.asarray(1 / (1 - RATE), dtype), np.float32))
        np.testing.assert_allclose(kept[kept != 0], scale, rtol=float(jnp.finfo(dtype).eps))
        assert abs((kept == 0).sum() - RATE * kept.size) < 5 * (kept.size * RATE * (1 - RATE)) ** 0.5
        # The sender of node n is n - 1: its gradient is the factor of the edge into n.
        eps = float(jnp.finfo(dtype).eps)
        np.testing.assert_allclose(np.asarray(gradient, np.float32)[..., 0], np.roll(kept, -1, axis=0), rtol=eps)
        assert (kept[:, 0] != kept[:, 1]).any()
        masks.append(kept != 0)
    for mask in masks[1:]:
        np.testing.assert_array_equal(mask, masks[0])


@pytest.mark.parametrize("policy", ["mixed_float16", "autocast_float16"])
def test_a_models_dropout_is_the_same_again_under_a_key(policy: str) -> None:
    """flax's Dropout draws its mask from the key alone: it is that of float32, and another one for another key."""
    layer = promoting(lambda x, key: nnx.Dropout(RATE)(x, rngs=nnx.Rngs(dropout=key)))
    run = jax.jit(jt.apply_policy(layer, jt.get_policy(policy)))
    x = jnp.ones((64, 64))
    masks = [np.asarray(run(x, jax.random.key(seed))) != 0 for seed in (0, 0, 1)]
    exact = np.asarray(jax.jit(layer)(x, jax.random.key(0))) != 0
    np.testing.assert_array_equal(masks[0], masks[1])
    np.testing.assert_array_equal(masks[0], exact)
    assert (masks[0] != masks[2]).any()
    assert abs(masks[0].mean() - (1 - RATE)) < 5 * (RATE * (1 - RATE) / x.size) ** 0.5
