"""Planted faults that cost accuracy and overflow nowhere: differences of large numbers, in losses and solvers."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
from flax import nnx
from jax import lax
from planting import Case, Fault, Way, mean_square, values
from promotion import promoting

WIDTH, ROWS = 8, 16
BF16 = "bfloat16"


def near(x: jax.Array, distance: float) -> jax.Array:
    """Returns points near others."""
    return x + distance * values(*x.shape, seed=7)


def discrepancy(way: Way) -> Case:
    """The maximum mean discrepancy of an autoencoder's codes, in haiku."""

    def encode(x: jax.Array) -> jax.Array:
        return hk.Linear(WIDTH)(jnp.tanh(hk.Linear(WIDTH)(x)))

    net: Any = hk.without_apply_rng(hk.transform(encode))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        a, b = net.apply(params, x), net.apply(params, y)
        cross = (a * a).sum(-1)[:, None] + (b * b).sum(-1) - 2 * a @ b.T  # fault: kernel of codes
        return -jnp.log(jnp.diag(jnp.exp(-200 * cross.astype(jnp.float32))) + 1e-3).mean()

    x = values(ROWS, WIDTH)
    return way.gradients(loss_fn), (net.init(jr.key(0), x), (x, near(x, 0.03)))


def retrieval(way: Way) -> Case:
    """Alignment of two views by the cosine, in nnx."""
    graph, params = nnx.split(nnx.Linear(WIDTH, WIDTH, rngs=nnx.Rngs(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        a, b = (nnx.merge(graph, params)(x) for x in batch)
        a, b = (x / jnp.sqrt((x * x).sum(-1, keepdims=True)) for x in (a, b))
        apart = 1 - (a * b).sum(-1)  # fault: cosine distance
        return jnp.mean(apart.astype(jnp.float32)) * 1e3

    x = values(ROWS, WIDTH)
    return way.gradients(promoting(loss_fn)), (params, (x, near(x, 0.05)))


def ratios(way: Way) -> Case:
    """Probability ratios of a policy in many dimensions, as PPO has them."""

    def log_prob(mean: jax.Array, action: jax.Array) -> jax.Array:
        return (-0.5 * (action - mean) ** 2 - 3.0).sum(-1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, old = batch
        ratio = log_prob(x @ params["w"], action) - old  # fault: log-probability ratio
        return -jnp.mean(jnp.exp(ratio.astype(jnp.float32)))

    x, w = values(ROWS, WIDTH), 0.3 * values(WIDTH, 64, seed=1)
    action = x @ w + values(ROWS, 64, seed=2)
    return way.gradients(loss_fn), ({"w": w}, (x, action, log_prob(x @ near(w, 0.01), action)))


def curvature(way: Way) -> Case:
    """A physics loss: second differences of a network's smooth solution."""

    def loss_fn(params: Any, t: jax.Array) -> jax.Array:
        u = jnp.tanh(t[:, None] * params["w"]) @ params["v"]
        second = (u[2:] - 2 * u[1:-1] + u[:-2]) * 1024  # fault: second differences
        return mean_square(second + u[1:-1])

    params = {"w": values(WIDTH), "v": values(WIDTH, seed=1)}
    return way.gradients(loss_fn), (params, jnp.linspace(0.5, 1.5, 33))


def laplacian(way: Way) -> Case:
    """A Laplacian that smooths features which are nearly alike, by degrees and sums."""
    senders = jnp.concatenate([(jnp.arange(ROWS) + k) % ROWS for k in (1, 2, 3, 5)])
    receivers = jnp.tile(jnp.arange(ROWS), 4)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        h = 60 + x @ params["w"]
        total = jnp.zeros_like(h).at[receivers].add(h[senders])
        smooth = 4 * h - total  # fault: Laplacian
        return mean_square(smooth)

    return way.gradients(loss_fn), ({"w": 0.1 * values(WIDTH, WIDTH)}, values(ROWS, WIDTH))


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


def expm1(way: Way) -> Case:
    """A step of a flow that is nearly the identity."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        rate = 0.02 * jnp.tanh(x @ params["w"])
        moved = (jnp.exp(rate) - 1) * 50  # fault: small exponential
        return mean_square(moved - x)

    return way.gradients(loss_fn), ({"w": values(WIDTH, WIDTH)}, 0.3 * values(ROWS, WIDTH))


DIFFERENCES = (
    Fault("kernel of codes", "cancellation", "haiku", discrepancy, BF16),
    Fault("cosine distance", "cancellation", "nnx", retrieval),
    Fault("log-probability ratio", "cancellation", "jax", ratios),
    Fault("second differences", "cancellation", "jax", curvature),
    Fault("Laplacian", "cancellation", "jax", laplacian),
    Fault("large mean", "cancellation", "haiku", standardized),
    Fault("residual", "cancellation", "equinox", residual, tolerance=0.06),
    Fault("small exponential", "cancellation", "jax", expm1, BF16),
)
