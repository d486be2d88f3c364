"""Probabilities that only a float32 loss reads are float32 under autocast: half would round their gradients all alike.

The gradients of a dice loss with respect to the probabilities of all pixels are two numbers. Rounded to half precision,
they are off by the same fraction for all pixels, which the sums over the pixels keep.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jmp_train.policies.autocasting.explain import explain_autocast
from jmp_train.policies.autocasting.transform import autocast

pytestmark = pytest.mark.quick

SIDE, CHANNELS = 32, 8
Loss = Callable[[jax.Array, jax.Array], jax.Array]


def dice(p: jax.Array, y: jax.Array) -> jax.Array:
    return 1 - (2 * jnp.sum(p * y) + 1) / (jnp.sum(p) + jnp.sum(y) + 1)


def tversky(p: jax.Array, y: jax.Array) -> jax.Array:
    both = jnp.sum(p * y)
    return 1 - both / (both + 0.3 * jnp.sum(p * (1 - y)) + 0.7 * jnp.sum((1 - p) * y))


LOSSES: dict[str, Loss] = {
    "dice": lambda z, y: dice(jax.nn.sigmoid(z), y),
    "logistic": lambda z, y: dice(lax.logistic(z), y),
    "jitted": lambda z, y: jax.jit(dice)(jax.jit(jax.nn.sigmoid)(z), y),
    "Tversky": lambda z, y: tversky(jax.nn.sigmoid(z), y),
}


@pytest.mark.parametrize("half", ["float16", pytest.param("bfloat16", marks=pytest.mark.full)])
def test_gradients_of_a_head(half: Any) -> None:
    def loss(heads: dict[str, Any], x: jax.Array, y: jax.Array) -> jax.Array:
        losses = [LOSSES[name]((x @ w + b)[..., 0], y) for name, (w, b) in heads.items()]
        return sum(losses, start=jnp.zeros(()))

    ours, plain = jax.jit(jax.grad(autocast(loss, half))), jax.jit(jax.grad(loss))
    for seed in range(4):
        random = np.random.default_rng(seed)
        x = np.maximum(random.normal(size=(4, SIDE, SIDE, CHANNELS)), 0).astype("f4")
        place, center = np.mgrid[:SIDE, :SIDE], random.uniform(SIDE / 4, 3 * SIDE / 4, (4, 2, 1, 1))
        y = (np.square(place - center).sum(1) < (SIDE / 5) ** 2).astype("f4")
        w, b = random.normal(size=(CHANNELS, 1)).astype("f4") / 3, 0.1 * random.normal(size=1).astype("f4")
        heads = dict.fromkeys(LOSSES, (w, b))
        found, exact = ours(heads, x, y), plain(heads, x, y)
        for name in LOSSES:
            gradient, wanted = (np.concatenate([np.ravel(part) for part in tree[name]]) for tree in (found, exact))
            apart = np.linalg.norm(gradient - wanted) / np.linalg.norm(wanted)
            assert apart < 0.5 * float(jnp.finfo(half).eps), (name, seed)


def test_probabilities_that_a_product_reads_stay_half() -> None:
    def gated(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x * jax.nn.sigmoid(x @ w)) @ w

    rows = explain_autocast(gated, np.ones((2, 2), "f4"), np.ones((2, 2), "f4")).operations
    assert [row.dtypes_out for row in rows if row.operation == "logistic"] == [("float16",)]
