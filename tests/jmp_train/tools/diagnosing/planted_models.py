"""Planted faults of kinds that only whole models have: an agent's in linen, and a ResNet's with batch statistics.

The agent's networks follow luchris429/purejaxrl and vwxyzjn/cleanrl (`c51_jax.py`), the ResNet google/flax
(`examples/imagenet/models.py`, `_ResNet1`), in small sizes.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flax import linen as nn
from flax.linen.initializers import orthogonal
from planting import Case, Fault, Way, mean_square, values
from promotion import promoting

ENVS, OBSERVED, ACTIONS, ATOMS = 32, 8, 4, 51
FILTERS, CLASSES, SIZE = 8, 8, 16
BF16 = "bfloat16"


def observations(seed: int = 0) -> jax.Array:
    return values(ENVS, OBSERVED, seed=seed)


def clocked(way: Way) -> Case:
    """A walking robot's value, of observations with the phase of its gait, as the environment's steps tell it."""
    critic: Any = nn.Sequential([nn.Dense(16, kernel_init=orthogonal(np.sqrt(2))), nn.tanh, nn.Dense(1)])

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, step, target = batch
        phase = 2 * jnp.pi * step.astype(x.dtype) * 0.02 / 0.7  # fault: phase of a gait
        clock = jnp.stack([jnp.sin(phase), jnp.cos(phase)], axis=-1)
        value = critic.apply(params, jnp.concatenate([x, clock.astype(x.dtype)], axis=-1))[:, 0]
        return mean_square(value - target)

    x = observations()
    params = critic.init(jr.key(0), jnp.pad(x, ((0, 0), (0, 2))))
    step = jr.randint(jr.key(1), (ENVS,), 400, 1000)
    return way.gradients(promoting(loss_fn)), (params, (x, step, values(ENVS, seed=2)))


class Atoms(nn.Module):
    """Cleanrl's network of C51: probabilities [batch, actions, atoms] of returns."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(32)(x))
        x = nn.Dense(ACTIONS * ATOMS, kernel_init=orthogonal(3.0))(x)
        return nn.softmax(x.reshape(len(x), ACTIONS, ATOMS), axis=-1)


def projected(way: Way) -> Case:
    """C51's target: returns between two atoms are shared by both."""
    network: Any = Atoms()
    low, high = -100.0, 100.0
    atoms = jnp.linspace(low, high, ATOMS)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, reward, next_pmfs = batch
        support = atoms.astype(reward.dtype)
        tz = jnp.clip(reward[:, None] + 0.99 * support, low, high)
        b = (tz - low) / (support[1] - support[0])  # fault: projection
        lower, upper = jnp.floor(b), jnp.ceil(b)
        to_lower, to_upper = (upper + (lower == upper) - b) * next_pmfs, (b - lower) * next_pmfs
        rows = jnp.arange(len(x))
        target = jnp.zeros_like(next_pmfs).at[rows[:, None], lower.astype(int)].add(to_lower)
        target = target.at[rows[:, None], upper.astype(int)].add(to_upper)
        pmfs = jnp.clip(network.apply(params, x)[rows, action], 1e-5, 1 - 1e-5)
        return (-(target * jnp.log(pmfs)).sum(-1)).mean()

    x, action = observations(), jr.randint(jr.key(2), (ENVS,), 0, ACTIONS)
    params = network.init(jr.key(0), x)
    next_pmfs = network.apply(params, x + 0.1 * observations(seed=3))[jnp.arange(ENVS), action]
    return way.gradients(promoting(loss_fn)), (params, (x, action, values(ENVS, seed=4), next_pmfs))


class Block(nn.Module):
    conv: Any
    norm: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        y = nn.relu(self.norm()(self.conv(FILTERS, (3, 3))(x)))
        y = self.norm(scale_init=nn.initializers.zeros_init())(self.conv(FILTERS, (3, 3))(y))
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=False, momentum=0.9, epsilon=1e-5)
        x = conv(FILTERS, (7, 7), (2, 2), padding=[(3, 3), (3, 3)], name="conv_init")(x)
        x = nn.max_pool(nn.relu(norm(name="bn_init")(x)), (3, 3), strides=(2, 2), padding="SAME")
        return nn.Dense(CLASSES, name="head")(Block(conv, norm, name="block")(x).mean((1, 2)))


def images(count: int = 8, seed: int = 1) -> jax.Array:
    return values(count, SIZE, SIZE, 3, seed=seed)


def start(x: Any) -> tuple[Any, Any]:
    """Returns parameters and batch statistics."""
    variables: Any = jax.jit(promoting(ResNet().init))(jr.key(0), x)
    return variables["params"], variables["batch_stats"]


def outputs(params: Any, stats: Any, x: Any) -> Any:
    return ResNet().apply({"params": params, "batch_stats": stats}, x, mutable=["batch_stats"])[0]


def debiased(way: Way) -> Case:
    """Features by a running mean that is rid of its bias, as haiku's moving averages are."""
    x = images()
    params, stats = start(x)

    def loss_fn(params: Any, batch: Any) -> Any:
        x, labels, count = batch
        logits = outputs(params, stats, x)
        decay = jnp.asarray(0.999, logits.dtype)
        hidden = (1 - decay) * logits.mean(0)
        mean = hidden / (1 - decay ** count.astype(logits.dtype))  # fault: average without its bias
        logits = (logits - mean).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    return way.gradients(promoting(loss_fn)), (params, (x, jnp.arange(len(x)) % CLASSES, jnp.array(1)))


def barlow_twins(way: Way) -> Case:
    """Barlow Twins late in training: two views agree, and what is on the diagonal is nearly 1."""
    x = images(16)
    params, stats = start(x)

    def loss_fn(params: Any, batch: Any) -> Any:
        a, b = (outputs(params, stats, view) for view in batch)
        a, b = ((z - z.mean(0)) / z.std(0) for z in (a, b))
        correlation = a.T @ b / len(a)
        on_diagonal = jnp.square(jnp.diag(correlation) - 1).sum()  # fault: redundancy reduction
        apart = jnp.square(correlation * (1 - jnp.eye(CLASSES, dtype=a.dtype))).sum()
        return on_diagonal.astype(jnp.float32) + 1e-4 * apart.astype(jnp.float32)

    return way.gradients(promoting(loss_fn)), (params, (x, x + 0.1 * images(16, seed=2)))


MODELS = (
    Fault("phase of a gait", "values collapse", "linen", clocked, BF16),
    Fault("projection", "integer precision lost", "linen", projected, BF16),
    Fault("average without its bias", "NaN made", "linen", debiased, BF16),
    Fault("redundancy reduction", "cancellation", "linen", barlow_twins, BF16, autocast=True),
)
