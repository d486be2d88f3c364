"""A score-based diffusion model in equinox, as its documentation's: a mixer, `filter_jit`, times sampled in strata."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from scripts import Script, gradients_of, half_optimizer


class MixerBlock(eqx.Module):
    patch_mixer: eqx.nn.MLP
    hidden_mixer: eqx.nn.MLP
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm

    def __init__(self, patches: int, hidden: int, *, key: jax.Array) -> None:
        patch_key, hidden_key = jr.split(key)
        self.patch_mixer = eqx.nn.MLP(patches, patches, 16, depth=1, key=patch_key)
        self.hidden_mixer = eqx.nn.MLP(hidden, hidden, 16, depth=1, key=hidden_key)
        self.norm1 = eqx.nn.LayerNorm((hidden, patches))
        self.norm2 = eqx.nn.LayerNorm((patches, hidden))

    def __call__(self, y: jax.Array) -> jax.Array:
        y = y + jax.vmap(self.patch_mixer)(self.norm1(y))
        y = y.T
        y = y + jax.vmap(self.hidden_mixer)(self.norm2(y))
        return y.T


class Mixer2d(eqx.Module):
    conv_in: eqx.nn.Conv2d
    conv_out: eqx.nn.ConvTranspose2d
    blocks: list[MixerBlock]
    norm: eqx.nn.LayerNorm
    t1: float

    def __init__(self, *, key: jax.Array) -> None:
        hidden, side = 8, 4
        in_key, out_key, *keys = jr.split(key, 4)
        self.conv_in = eqx.nn.Conv2d(2, hidden, 2, stride=2, key=in_key)
        self.conv_out = eqx.nn.ConvTranspose2d(hidden, 1, 2, stride=2, key=out_key)
        self.blocks = [MixerBlock(side**2, hidden, key=k) for k in keys]
        self.norm = eqx.nn.LayerNorm((hidden, side**2))
        self.t1 = 10.0

    def __call__(self, t: Any, y: jax.Array, *, key: Any = None) -> jax.Array:
        t = jnp.array(t) / self.t1
        _, height, width = y.shape
        t = jnp.broadcast_to(t, (1, height, width))
        y = self.conv_in(jnp.concatenate([y, t]))
        hidden, patch_height, patch_width = y.shape
        y = y.reshape(hidden, patch_height * patch_width)
        for block in self.blocks:
            y = block(y)
        y = self.norm(y).reshape(hidden, patch_height, patch_width)
        return self.conv_out(y)


def int_beta(t: Any) -> Any:
    return t


def weight(t: jax.Array) -> jax.Array:
    return 1 - jnp.exp(-int_beta(t))


def single_loss_fn(model: Any, data: jax.Array, t: jax.Array, key: jax.Array) -> jax.Array:
    mean = data * jnp.exp(-0.5 * int_beta(t))
    std = jnp.sqrt(jnp.maximum(1 - jnp.exp(-int_beta(t)), 1e-5))
    noise = jr.normal(key, data.shape)
    pred = model(t, mean + std * noise)
    return weight(t) * jnp.mean((pred + noise / std) ** 2)


def loss_fn(model: Any, data: jax.Array, t1: float, key: jax.Array) -> jax.Array:
    count = data.shape[0]
    tkey, losskey = jr.split(key)
    t = jr.uniform(tkey, (count,), minval=0, maxval=t1 / count)
    t = t + (t1 / count) * jnp.arange(count)
    each_loss = jax.vmap(functools.partial(single_loss_fn, model))
    return jnp.mean(each_loss(data, t, jr.split(losskey, count)))


def model_and_data() -> tuple[Mixer2d, jax.Array]:
    shapes = np.random.default_rng(0).choice([-1.0, 1.0], (16, 1, 8, 8))
    return Mixer2d(key=jr.key(0)), jnp.asarray(np.sort(shapes, axis=3), jnp.float32)


def loss_args() -> tuple[Any, ...]:
    return *model_and_data(), 10.0, jr.key(0)


@functools.cache
def script(half: bool) -> Script:
    model, data = model_and_data()
    opt = half_optimizer(optax.adabelief(3e-3), half)
    opt_state = opt.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model: Any, data: Any, key: jax.Array, opt_state: Any, update: Callable) -> Any:
        grad_fn = gradients_of(loss_fn, half, eqx.filter_value_and_grad)
        loss, grads = grad_fn(opt_state, model, data, 10.0, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, opt_state = update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        return loss, model, jr.split(key, 1)[0], opt_state

    def step(state: Any, data: Any) -> Any:
        model, key, opt_state = state
        loss, *state = make_step(model, data, key, opt_state, opt.update)
        return tuple(state), loss

    return Script((model, jr.key(1), opt_state), step, data)
