"""Planted faults of numbers that half precision has not: positions, timesteps, epsilons, masks, decays."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flax import linen as nn
from flax import nnx
from jax import lax
from planting import Case, Fault, Way, mean_square, values

BF16 = "bfloat16"
WIDTH, LENGTH = 8, 8
FAR = 65536


class RotaryAttention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        positions = jnp.arange(FAR, FAR + len(x)).astype(x.dtype)  # fault: rotary positions
        angles = positions[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001], x.dtype)
        turned = [turn(jax.vmap(layer)(x), angles) for layer in (self.query, self.key)]
        return jax.nn.softmax(turned[0] @ turned[1].T) @ x


def turn(x: jax.Array, angles: jax.Array) -> jax.Array:
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], axis=-1)


def rotary(way: Way, scanned: bool = False) -> Case:
    keys = jr.split(jr.key(0))
    model = RotaryAttention(*(eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in keys))

    def loss_fn(model: RotaryAttention, x: jax.Array) -> jax.Array:
        if scanned:
            return mean_square(lax.scan(lambda x, _: (x + model(x).astype(x.dtype), None), x, None, length=2)[0])
        return mean_square(model(x))

    return way.gradients(loss_fn), (model, values(LENGTH, WIDTH))


class Denoiser(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.last = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array, times: jax.Array) -> jax.Array:
        steps = times.astype(x.dtype)  # fault: timesteps
        angles = steps[:, None] * jnp.array([1.0, 0.1, 0.01, 0.001], x.dtype)
        embedding = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return self.last(nnx.silu(self.first(jnp.concatenate([x, embedding], axis=-1))))


def diffusion(way: Way) -> Case:
    graph, params = nnx.split(Denoiser(nnx.Rngs(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return mean_square(nnx.merge(graph, params)(*batch))

    return way.training(loss_fn, params, (values(LENGTH, WIDTH), jnp.arange(992, 992 + LENGTH)))


class HaikuDecoder(hk.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        position = jnp.arange(len(x), dtype=x.dtype)  # fault: sinusoidal positions
        angles = position[:, None] * jnp.array([1.0, 0.3, 0.1, 0.03], x.dtype)
        x = x + jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)
        return hk.Linear(WIDTH)(x)


def sinusoidal(way: Way) -> Case:
    net = hk.without_apply_rng(hk.transform(lambda x: HaikuDecoder()(x)))
    x = values(400, WIDTH)
    return way.gradients(lambda params, x: mean_square(net.apply(params, x))), (net.init(jr.key(0), x), x)


class BiasedAttention(nn.Module):
    """Attention with linear biases, of the last tokens to all before."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        queries, keys = nn.Dense(WIDTH)(x[-LENGTH:]), nn.Dense(WIDTH)(x)
        distance = jnp.arange(len(x) - LENGTH, len(x))[:, None] - jnp.arange(len(x))
        bias = -distance.astype(x.dtype) * 0.25  # fault: linear biases
        return nn.softmax(queries @ keys.T / 8 + bias) @ x


def linear_biases(way: Way) -> Case:
    model, x = BiasedAttention(), values(400, WIDTH)
    # Of equally distant tokens, the far ones count for nothing, unless the near ones are masked: here they are small.
    x = x.at[-300:].set(-x[-300:] / 4)
    return way.gradients(lambda p, x: mean_square(model.apply(p, x))), (model.init(jr.key(0), x), x)


class Epsilons(nn.Module):
    """A layer norm as it is written by hand, of rows that are zero where there is padding."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mean = x.mean(-1, keepdims=True)
        variance = jnp.mean((x - mean) ** 2, -1, keepdims=True)
        x = (x - mean) / jnp.sqrt(variance + self.epsilon)  # fault: epsilon of a norm
        return nn.Dense(WIDTH)(x)


def padded() -> jax.Array:
    return values(LENGTH, WIDTH).at[-2:].set(0)


def norm_epsilon(way: Way, remat: bool = False) -> Case:
    kind: Any = nn.remat(Epsilons) if remat else Epsilons
    model = kind(way.number(1e-8))
    params = Epsilons(1e-3).init(jr.key(0), padded())
    return way.gradients(lambda p, x: mean_square(model.apply(p, x))), (params, padded())


def similarity_epsilon(way: Way) -> Case:
    eps = way.number(1e-12)

    def similarities(x: jax.Array) -> jax.Array:
        z = hk.Linear(WIDTH, with_bias=False)(x)
        norm = jnp.sqrt(jnp.sum(z * z, -1, keepdims=True))
        z = z / jnp.maximum(norm, eps)  # fault: epsilon of a similarity
        return z @ z.T

    net = hk.without_apply_rng(hk.transform(similarities))
    return way.run(net.apply), (net.init(jr.key(0), padded()), padded())


class Critic(eqx.Module):
    first: eqx.nn.Linear
    last: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(self.last(jax.nn.leaky_relu(self.first(x)))[0])


def critic() -> Critic:
    return Critic(eqx.nn.Linear(WIDTH, WIDTH, key=jr.key(0)), eqx.nn.Linear(WIDTH, 1, key=jr.key(1)))


def gan_epsilon(way: Way) -> Case:
    def loss_fn(critic: Critic, batch: tuple[jax.Array, jax.Array]) -> jax.Array:
        real, fake = (jax.vmap(critic)(x) for x in batch)
        on_fake = jnp.log(1 - fake + 1e-8)  # fault: epsilon of a GAN
        return -jnp.mean(jnp.log(real + 0.001) + on_fake)

    fake = values(LENGTH, WIDTH, scale=30.0)
    return way.gradients(loss_fn), (critic(), (values(LENGTH, WIDTH), fake))


def clipped_probabilities(way: Way) -> Case:
    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        p = jax.nn.sigmoid(x @ params["w"])
        p = jnp.clip(p, 1e-8, 1.0)  # fault: clipped probabilities
        return -jnp.mean(jnp.log(p))

    return way.gradients(loss_fn), ({"w": values(WIDTH, 1)}, values(LENGTH, WIDTH, scale=10.0))


class MaskedAttention(nn.Module):
    fill: float

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array) -> jax.Array:
        queries, keys = nn.Dense(WIDTH)(x), nn.Dense(WIDTH)(x)
        logits = queries @ keys.T / jnp.sqrt(jnp.array(WIDTH, x.dtype))
        logits = jnp.where(mask, logits, self.fill)  # fault: mask of attention
        return nn.softmax(logits) @ x


def attention_mask(way: Way, where: str = "plain") -> Case:
    kind: Any = nn.remat(MaskedAttention) if where == "remat" else MaskedAttention
    model, x = kind(way.number(-1e9)), values(LENGTH, WIDTH)
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool)).at[0].set(False)  # the first token is padding
    params = MaskedAttention(-1.0).init(jr.key(0), x, mask)
    return way.gradients(lambda p, x: mean_square(model.apply(p, x, mask))), (params, x)


class DenseGAT(nnx.Module):
    def __init__(self, fill: float, rngs: nnx.Rngs) -> None:
        self.project = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.scores = nnx.Linear(WIDTH, 2, rngs=rngs)
        self.fill = fill

    def __call__(self, x: jax.Array, adjacency: jax.Array) -> jax.Array:
        h = self.project(x)
        left, right = self.scores(h).T
        scores = nnx.leaky_relu(left[:, None] + right)
        scores = jnp.where(adjacency > 0, scores, self.fill)  # fault: mask of neighbors
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ h


def neighbor_mask(way: Way) -> Case:
    graph, params = nnx.split(DenseGAT(way.number(-9e15), nnx.Rngs(0)))
    adjacency = (
        (jnp.eye(LENGTH) + jnp.eye(LENGTH, k=1) + jnp.eye(LENGTH, k=-2)).at[3].set(0)
    )  # a node without neighbors

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        return mean_square(nnx.merge(graph, params)(x, adjacency))

    return way.gradients(loss_fn), (params, values(LENGTH, WIDTH))


def smoothed(way: Way) -> Case:
    """A moving average over a sequence, whose decay is 1 in the half types."""

    def smooth(x: jax.Array) -> jax.Array:
        def step(average: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
            average = 0.9999 * average + (1 - 0.9999) * row  # fault: decay of an average
            return average, average

        return lax.scan(step, jnp.ones(WIDTH, x.dtype), x)[1]

    return way.run(smooth), (2 + values(2000, WIDTH, scale=0.1),)


def fourier(way: Way) -> Case:
    """A coordinate network of Fourier features, as neural fields have them."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        phases = jnp.sin(2 * np.pi * (x @ params["frequencies"]))  # fault: Fourier features
        return mean_square(jnp.tanh(phases @ params["w"]))

    params = {"frequencies": values(2, WIDTH, scale=400.0), "w": values(WIDTH, WIDTH)}
    return way.gradients(loss_fn), (params, values(LENGTH, 2, seed=1))


MASK: Any = {"action": "mask", "applied": "value"}


def in_remat(build: Any, *args: Any) -> Any:
    return lambda way: build(way, *args)


NUMBERS = (
    Fault("rotary positions", "integer precision lost", "equinox", rotary, BF16),
    Fault("rotary positions", "integer precision lost", "equinox", lambda way: rotary(way, True), BF16, where="scan"),
    Fault("timesteps", "integer precision lost", "nnx", diffusion, BF16, where="train_step"),
    Fault("sinusoidal positions", "integer precision lost", "haiku", sinusoidal, BF16),
    Fault("linear biases", "integer precision lost", "linen", linear_biases, BF16),
    Fault("epsilon of a norm", "underflow", "linen", norm_epsilon, action="epsilon", applied="value", quick=True),
    Fault("epsilon of a norm", "underflow", "linen", in_remat(norm_epsilon, True), where="remat", action="epsilon"),
    Fault("epsilon of a similarity", "underflow", "haiku", similarity_epsilon, action="epsilon", applied="value"),
    Fault("epsilon of a GAN", "underflow", "equinox", gan_epsilon, action="epsilon"),
    Fault("clipped probabilities", "underflow", "jax", clipped_probabilities, action="epsilon"),
    Fault("mask of attention", "invalid mask", "linen", attention_mask, **MASK),
    Fault("mask of attention", "invalid mask", "linen", in_remat(attention_mask, "remat"), where="remat", **MASK),
    Fault("mask of neighbors", "invalid mask", "nnx", neighbor_mask, **MASK),
    Fault("decay of an average", "stagnation", "jax", smoothed, BF16, where="scan"),
    Fault("Fourier features", "cancellation", "jax", fourier),
)
