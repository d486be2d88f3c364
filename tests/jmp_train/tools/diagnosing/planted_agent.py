"""Ten planted faults of agents in linen, as purejaxrl, cleanrl and jaxrl write them.

The networks and losses follow luchris429/purejaxrl (`ppo_continuous_action.py`, `wrappers.py`), vwxyzjn/cleanrl
(`c51_jax.py`, `ppo_atari_envpool_xla_jax.py`) and ikostrikov/jaxrl (`sac/actor.py`), in small sizes.
"""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from flax import linen as nn
from flax.linen.initializers import constant, orthogonal
from jax import lax
from planting import Case, Fault, Way, mean_square, values
from promotion import promoting

ENVS, OBSERVED, ACTIONS, STEPS, ATOMS = 32, 8, 4, 128, 51
GAMMA, CLIP_EPS = 0.997, 0.2
BF16 = "bfloat16"


class ActorCritic(nn.Module):
    """Purejaxrl's network of a continuous policy, after some training: its means are not near 0."""

    log_std: float = 0.0

    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        mean = nn.tanh(nn.Dense(16, kernel_init=orthogonal(np.sqrt(2)))(x))
        mean = nn.Dense(ACTIONS, kernel_init=orthogonal(1.0))(mean)
        log_std = self.param("log_std", constant(self.log_std), (ACTIONS,))
        value = nn.tanh(nn.Dense(16, kernel_init=orthogonal(np.sqrt(2)))(x))
        return mean, log_std, nn.Dense(1, kernel_init=orthogonal(1.0))(value).squeeze(-1)


class Atoms(nn.Module):
    """Cleanrl's network of C51: probabilities [batch, actions, atoms] of returns."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.Dense(32)(x))
        x = nn.Dense(ACTIONS * ATOMS, kernel_init=orthogonal(3.0))(x)
        return nn.softmax(x.reshape(len(x), ACTIONS, ATOMS), axis=-1)


def observations(*shape: int, seed: int = 0) -> jax.Array:
    return values(*shape, OBSERVED, seed=seed)


def acted(network: Any, params: Any, x: jax.Array, seed: int = 1) -> jax.Array:
    """Returns actions that a policy takes."""
    mean, log_std, _ = network.apply(params, x)
    return mean + jnp.exp(log_std) * values(*mean.shape, seed=seed)


def narrow(way: Way) -> Case:
    """Advantage-weighted regression, as implicit Q-learning extracts a policy, which has become narrow."""
    network: Any = ActorCritic(log_std=-5.0)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, advantage = batch
        mean, log_std, _ = network.apply(params, x)
        z = (action - mean) / jnp.exp(log_std)  # fault: action of a narrow policy
        log_prob = (-0.5 * jnp.square(z) - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)
        return -(jnp.exp(advantage) * log_prob).mean()

    x = observations(ENVS)
    params = network.init(jr.key(0), x)
    return way.gradients(promoting(loss_fn)), (params, (x, acted(network, params, x), values(ENVS, seed=2)))


def distilled(way: Way) -> Case:
    """A policy of discrete actions that learns from a teacher, by the estimator of the divergence in PPO's loops."""
    network: Any = nn.Dense(ACTIONS, kernel_init=orthogonal(1.0))

    def log_prob(params: Any, x: jax.Array, action: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(network.apply(params, x))[jnp.arange(len(x)), action]

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, teacher = batch
        new = log_prob(params, x, action)
        approx_kl = (jnp.exp(new - teacher) - 1) - (new - teacher)  # fault: approximate divergence
        return approx_kl.mean()

    x, action = observations(ENVS), jr.randint(jr.key(2), (ENVS,), 0, ACTIONS)
    params = network.init(jr.key(0), x)
    moved = jax.tree.map(lambda w: w + 0.02 * values(*w.shape, seed=3), params)
    return way.gradients(promoting(loss_fn)), (params, (x, action, log_prob(moved, x, action)))


def clocked(way: Way) -> Case:
    """A walking robot's value, of observations with the phase of its gait, as the environment's steps tell it."""
    network: Any = ActorCritic()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, step, target = batch
        phase = 2 * jnp.pi * step.astype(x.dtype) * 0.02 / 0.7  # fault: phase of a gait
        clock = jnp.stack([jnp.sin(phase), jnp.cos(phase)], axis=-1)
        value = network.apply(params, jnp.concatenate([x, clock.astype(x.dtype)], axis=-1))[2]
        return mean_square(value - target)

    x = observations(ENVS)
    params = network.init(jr.key(0), jnp.pad(x, ((0, 0), (0, 2))))
    step = jr.randint(jr.key(1), (ENVS,), 400, 1000)
    return way.gradients(promoting(loss_fn)), (params, (x, step, values(ENVS, seed=2)))


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

    x, action = observations(ENVS), jr.randint(jr.key(2), (ENVS,), 0, ACTIONS)
    params = network.init(jr.key(0), x)
    next_pmfs = network.apply(params, x + 0.1 * observations(ENVS, seed=3))[jnp.arange(ENVS), action]
    return way.gradients(promoting(loss_fn)), (params, (x, action, values(ENVS, seed=4), next_pmfs))


def discounted(way: Way) -> Case:
    """A critic that regresses on the returns of a long rollout, with a discount near 1."""
    network: Any = ActorCritic()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, rewards = batch

        def backwards(following: jax.Array, reward: jax.Array) -> tuple[jax.Array, jax.Array]:
            following = reward + GAMMA * following  # fault: discounted returns
            return following, following

        value = network.apply(params, x)[2]
        _, returns = lax.scan(backwards, jnp.zeros_like(rewards[0]), rewards, reverse=True)
        return 0.5 * mean_square(value - 0.1 * returns)

    x = observations(STEPS, 4)
    rewards = jnp.abs(values(STEPS, 4, seed=1))
    return way.gradients(promoting(loss_fn)), (network.init(jr.key(0), x), (x, rewards))


def importance(way: Way) -> Case:
    """Importance weights of whole episodes, as off-policy policy gradients have them."""
    network: Any = ActorCritic(log_std=-1.0)

    def log_prob(params: Any, x: jax.Array, action: jax.Array) -> jax.Array:
        mean, log_std, _ = network.apply(params, x)
        return (-0.5 * jnp.square((action - mean) / jnp.exp(log_std)) - log_std).sum(-1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, behavior, returns = batch
        weights = jnp.exp((log_prob(params, x, action) - behavior).sum(0))  # fault: weights of episodes
        return -(weights * returns).mean()

    x = observations(STEPS, 8)
    params = network.init(jr.key(0), x)
    moved = jax.tree.map(lambda w: w + 0.003 * values(*w.shape, seed=3), params)
    action = acted(network, moved, x)
    batch = x, action, log_prob(moved, x, action), 1 + 0.3 * values(8, seed=2)
    return way.gradients(promoting(loss_fn)), (params, batch)


def standardized(way: Way) -> Case:
    """Purejaxrl's normalized observations, one of which never changes."""
    network: Any = ActorCritic()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, target = batch
        x = (x - jnp.mean(x, axis=0)) / jnp.sqrt(jnp.var(x, axis=0) + way.number(1e-8))  # fault: constant observation
        return mean_square(network.apply(params, x)[2] - target)

    x = observations(ENVS).at[:, 3].set(1)
    return way.gradients(promoting(loss_fn)), (network.init(jr.key(0), x), (x, values(ENVS, seed=1)))


def unscaled(way: Way) -> Case:
    """PPO's clipped value loss of rewards that nothing scales."""
    network: Any = nn.Sequential([nn.Dense(16), nn.tanh, nn.Dense(1)])

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, old, targets = batch
        value = network.apply(params, x)[:, 0]
        clipped = old + jnp.clip(value - old, -CLIP_EPS, CLIP_EPS)
        value_losses = jnp.maximum(jnp.square(value - targets), jnp.square(clipped - targets))  # fault: value loss
        return 0.5 * value_losses.mean()

    x = observations(ENVS)
    batch = x, values(ENVS, seed=1), 400 + 50 * values(ENVS, seed=2)
    return way.gradients(promoting(loss_fn)), (network.init(jr.key(0), x), batch)


def far_off(way: Way) -> Case:
    """PPO's ratio of an action that the old policy hardly ever took."""
    network: Any = ActorCritic(log_std=-1.0)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action, old, gae = batch
        mean, log_std, _ = network.apply(params, x)
        log_prob = (-0.5 * jnp.square((action - mean) / jnp.exp(log_std)) - log_std).sum(-1)
        ratio = jnp.exp(log_prob - old)  # fault: probability ratio
        return -jnp.minimum(ratio * gae, jnp.clip(ratio, 1 - CLIP_EPS, 1 + CLIP_EPS) * gae).mean()

    x = observations(ENVS)
    params = network.init(jr.key(0), x)
    action = acted(network, params, x)
    mean, log_std, _ = network.apply(params, x)
    log_prob = (-0.5 * jnp.square((action - mean) / jnp.exp(log_std)) - log_std).sum(-1)
    old = (log_prob + 0.1 * values(ENVS, seed=3)).at[5].add(-12.0)
    return way.gradients(promoting(loss_fn)), (params, (x, action, old, values(ENVS, seed=2)))


def saturated(way: Way) -> Case:
    """The log-probability of stored actions of a squashed policy, whose tanh is inverted."""
    network: Any = ActorCritic()

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, action = batch
        mean, log_std, _ = network.apply(params, x)
        pre_tanh = jnp.arctanh(jnp.clip(action, -1 + 1e-6, 1 - 1e-6))  # fault: saturated actions
        return (0.5 * jnp.square((pre_tanh - mean) / jnp.exp(log_std)) + log_std).sum(-1).mean()

    x = observations(ENVS)
    params = network.init(jr.key(0), x)
    return way.gradients(promoting(loss_fn)), (params, (x, jnp.tanh(2 * acted(network, params, x))))


AGENT = (
    Fault("action of a narrow policy", "cancellation", "linen", narrow),
    Fault("approximate divergence", "cancellation", "linen", distilled, BF16, tolerance=0.08),
    Fault("phase of a gait", "values collapse", "linen", clocked, BF16),
    Fault("projection", "integer precision lost", "linen", projected, BF16),
    Fault("discounted returns", "cancellation", "linen", discounted, BF16, where="scan"),
    Fault("weights of episodes", "cancellation", "linen", importance, BF16),
    Fault("constant observation", "underflow", "linen", standardized, action="epsilon", applied="value"),
    Fault("value loss", "overflow", "linen", unscaled),
    Fault("probability ratio", "overflow", "linen", far_off),
    Fault("saturated actions", "overflow", "linen", saturated),
)
