"""Proximal policy optimization in flax linen, as flax's Atari example: minibatches in a scan, frames in bytes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from scripts import Script, gradients_of, half_optimizer

ACTIONS = 4


class ActorCritic(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        dtype = jnp.float32
        x = x.astype(dtype) / 255.0
        x = nn.relu(nn.Conv(8, (4, 4), strides=(2, 2), name="conv1", dtype=dtype)(x))
        x = nn.relu(nn.Conv(8, (3, 3), strides=(2, 2), name="conv2", dtype=dtype)(x))
        x = x.reshape((x.shape[0], -1))
        x = nn.relu(nn.Dense(32, name="hidden", dtype=dtype)(x))
        logits = nn.Dense(ACTIONS, name="logits", dtype=dtype)(x)
        return nn.log_softmax(logits), nn.Dense(1, name="value", dtype=dtype)(x)


def loss_fn(params: Any, minibatch: Any) -> jax.Array:
    states, actions, old_log_probs, returns, advantages = minibatch
    outputs: Any = ActorCritic().apply({"params": params}, states)
    log_probs, values = outputs
    probs = jnp.exp(log_probs)
    value_loss = jnp.mean(jnp.square(returns - values[:, 0]))
    entropy = jnp.sum(-probs * log_probs, axis=1).mean()
    acted = jax.vmap(lambda lp, a: lp[a])(log_probs, actions)
    ratios = jnp.exp(acted - old_log_probs)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    clipped = advantages * jnp.clip(ratios, 0.9, 1.1)
    ppo_loss = -jnp.mean(jnp.minimum(ratios * advantages, clipped))
    return ppo_loss + 0.5 * value_loss - 0.01 * entropy


def trajectories() -> tuple[Any, ...]:
    random = np.random.default_rng(0)
    return (
        jnp.asarray(random.integers(0, 256, (32, 16, 16, 4)), jnp.uint8),
        jnp.asarray(random.integers(0, ACTIONS, 32), jnp.int32),
        jnp.full(32, np.log(1 / ACTIONS), jnp.float32),
        jnp.asarray(random.normal(2, 1, 32), jnp.float32),
        jnp.asarray(random.normal(0, 1, 32), jnp.float32),
    )


@functools.cache
def script(half: bool) -> Script:
    params = jax.jit(ActorCritic().init)(jax.random.key(0), trajectories()[0])["params"]
    tx = half_optimizer(optax.adam(2e-3), half)
    state = train_state.TrainState.create(apply_fn=ActorCritic().apply, params=params, tx=tx)

    def update(state: Any, minibatch: Any) -> Any:
        loss, grads = gradients_of(loss_fn, half)(state.opt_state, state.params, minibatch)
        return state.apply_gradients(grads=grads), loss

    @jax.jit
    def train_step(state: Any, trajectories: Any) -> Any:
        minibatches = jax.tree.map(lambda x: x.reshape(2, -1, *x.shape[1:]), trajectories)
        state, losses = jax.lax.scan(update, state, minibatches)
        return state, losses.sum()

    return Script(state.replace(step=jnp.int32(0)), train_step, trajectories())


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, trajectories()
