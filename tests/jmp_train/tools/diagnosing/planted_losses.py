"""Planted faults that cost accuracy and overflow nowhere, in losses, norms and solvers of public kinds of models."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
from flax import linen as nn
from jax import lax
from planting import Case, Fault, Way, mean_square, values
from promotion import promoting

WIDTH, ROWS = 8, 16
BF16 = "bfloat16"


def standardized(way: Way) -> Case:
    """Features of a large mean, standardized within a haiku model."""

    def forward(x: jax.Array) -> jax.Array:
        h = 3000 + hk.Linear(WIDTH)(x)
        h = (h - h.mean(-1, keepdims=True)) / 0.5  # fault: large mean
        return hk.Linear(1)(h)

    net: Any = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(net.apply(params, x))

    x = values(ROWS, WIDTH)
    return way.gradients(loss_fn), (net.init(jr.key(0), x), x)


def energy(way: Way) -> Case:
    """The drift of an energy that a Hamiltonian network conserves."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, moved = batch

        def hamiltonian(x: jax.Array) -> jax.Array:
            return 100 + jnp.tanh(x @ params["w"]).sum(-1)

        drift = hamiltonian(moved) - hamiltonian(x)  # fault: energy drift
        return mean_square(drift) * 1e3

    x = values(ROWS, WIDTH)
    return way.gradients(loss_fn), ({"w": values(WIDTH, WIDTH)}, (x, x + 0.05 * values(ROWS, WIDTH, seed=3)))


def returns(way: Way) -> Case:
    """Temporal differences of large values, as a critic has them."""
    layer: Any = nn.Dense(1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, following, reward = batch
        value, after = (500 + layer.apply(params, s)[:, 0] for s in (x, following))
        error = reward + 0.99 * after - value  # fault: temporal difference
        return mean_square(error)

    x = values(ROWS, WIDTH)
    batch = x, x + 0.1 * values(ROWS, WIDTH, seed=2), 5 + 0.1 * values(ROWS, seed=3)
    return way.gradients(promoting(loss_fn)), (layer.init(jr.key(0), x), batch)


def residual(way: Way) -> Case:
    """The residual of a fixed point, as deep equilibrium models iterate it, in equinox."""
    layer = eqx.nn.Linear(WIDTH, WIDTH, key=jr.key(0))

    def loss_fn(layer: Any, x: jax.Array) -> jax.Array:
        def step(z: jax.Array, _: None) -> tuple[jax.Array, None]:
            return jnp.tanh(0.5 * jax.vmap(layer)(z) + x), None

        z, _ = lax.scan(step, jnp.zeros_like(x), None, length=6)
        apart = jnp.tanh(0.5 * jax.vmap(layer)(z) + x) - z  # fault: residual
        return mean_square(apart) * 1e6

    return way.gradients(loss_fn), (layer, values(ROWS, WIDTH))


def contrast(way: Way) -> Case:
    """A margin between the scores of two answers, as a reward model compares them."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        good, bad = (40 + x @ params["w"] for x in batch)
        margin = good - bad  # fault: margin of scores
        return -jax.nn.log_sigmoid(8 * margin.astype(jnp.float32)).mean()

    x = values(ROWS, WIDTH)
    return way.gradients(loss_fn), ({"w": 0.3 * values(WIDTH)}, (x, x + 0.2 * values(ROWS, WIDTH, seed=4)))


def expm1(way: Way) -> Case:
    """A step of a flow that is nearly the identity."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        rate = 0.02 * jnp.tanh(x @ params["w"])
        moved = (jnp.exp(rate) - 1) * 50  # fault: small exponential
        return mean_square(moved - x)

    return way.gradients(loss_fn), ({"w": values(WIDTH, WIDTH)}, 0.3 * values(ROWS, WIDTH))


LOSSES = (
    Fault("large mean", "cancellation", "haiku", standardized),
    Fault("energy drift", "cancellation", "jax", energy),
    Fault("temporal difference", "cancellation", "linen", returns),
    Fault("residual", "cancellation", "equinox", residual, tolerance=0.06),
    Fault("margin of scores", "cancellation", "jax", contrast, BF16),
    Fault("small exponential", "cancellation", "jax", expm1, BF16),
)
