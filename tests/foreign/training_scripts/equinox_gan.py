"""A convolutional GAN in equinox, as its documentation's: batch norms with State, two optimizers."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from scripts import Script, gradients_of, half_optimizer

import jmp_train as jt

LATENTS = 8


class Generator(eqx.Module):
    layers: list[Any]

    def __init__(self, key: jax.Array) -> None:
        keys = jr.split(key, 3)
        up = functools.partial(eqx.nn.ConvTranspose2d, use_bias=False)
        self.layers = [
            up(LATENTS, 16, 2, stride=1, padding=0, key=keys[0]),
            eqx.nn.BatchNorm(16, axis_name="batch", mode="ema"),
            jax.nn.relu,
            up(16, 8, 4, stride=2, padding=1, key=keys[1]),
            eqx.nn.BatchNorm(8, axis_name="batch", mode="ema"),
            jax.nn.relu,
            up(8, 1, 4, stride=2, padding=1, key=keys[2]),
            jax.nn.tanh,
        ]

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        return through(self.layers, x, state)


class Discriminator(eqx.Module):
    layers: list[Any]

    def __init__(self, key: jax.Array) -> None:
        keys = jr.split(key, 3)
        leaky = eqx.nn.PReLU(0.2)
        self.layers = [
            eqx.nn.Conv2d(1, 8, 4, stride=2, padding=1, use_bias=False, key=keys[0]),
            leaky,
            eqx.nn.Conv2d(8, 16, 4, stride=2, padding=1, use_bias=False, key=keys[1]),
            eqx.nn.BatchNorm(16, axis_name="batch", mode="ema"),
            leaky,
            eqx.nn.Conv2d(16, 1, 2, stride=1, padding=0, use_bias=False, key=keys[2]),
            jax.nn.sigmoid,
        ]

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        return through(self.layers, x, state)


def through(layers: list[Any], x: jax.Array, state: eqx.nn.State) -> tuple[Any, eqx.nn.State]:
    for layer in layers:
        if isinstance(layer, eqx.nn.BatchNorm):
            x, state = layer(x, state)
        else:
            x = layer(x)
    return x, state


def batched(model: Any, x: jax.Array, state: Any) -> Any:
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def binary_cross_entropy(output: jax.Array, targets: Any) -> jax.Array:
    low, high = jnp.log(output + 1e-7), jnp.log(1 - output + 1e-7)
    return -jnp.mean(targets * low + (1 - targets) * high)


def discriminator_loss(discriminator: Any, state: Any, fake: jax.Array, real: jax.Array) -> Any:
    on_real, state = batched(discriminator, real, state)
    on_fake, state = batched(discriminator, fake, state)
    loss = binary_cross_entropy(on_real, 1) + binary_cross_entropy(on_fake, 0)
    return loss / 2, state


def loss_fn(generator: Any, states: Any, discriminator: Any, noise: jax.Array) -> Any:
    fake, generator_state = batched(generator, noise, states[0])
    output, discriminator_state = batched(discriminator, fake, states[1])
    return binary_cross_entropy(output, 1), (generator_state, discriminator_state)


def models() -> Any:
    return [eqx.nn.make_with_state(model)(key) for model, key in ((Generator, jr.key(0)), (Discriminator, jr.key(1)))]


def real_images() -> jax.Array:
    smooth = np.cumsum(np.random.default_rng(0).normal(size=(8, 1, 8, 8)), axis=3)
    return jnp.asarray(np.tanh(smooth), jnp.float32)


def step_of(of_model: Any, optimizer: Any, half: bool) -> Any:
    """Returns a step of one of the two models, by its own optimizer."""

    grad_fn = gradients_of(of_model, half, eqx.filter_value_and_grad, has_aux=True)

    def step(model: Any, states: Any, opt_state: Any, *args: Any) -> Any:
        (loss, new_states), grads = grad_fn(opt_state, model, states, *args)
        params = eqx.filter(model, eqx.is_array)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        model = eqx.apply_updates(model, updates)
        if half:
            new_states = jt.select_step(opt_state, new_states, states)
        return loss, model, new_states, opt_state

    return step


def loss_args() -> tuple[Any, ...]:
    (generator, g_state), (discriminator, d_state) = models()
    return generator, (g_state, d_state), discriminator, jr.normal(jr.key(0), (8, LATENTS, 1, 1))


def discriminator_args() -> tuple[Any, ...]:
    (generator, g_state), (discriminator, d_state) = models()
    fake, _ = batched(generator, jr.normal(jr.key(0), (8, LATENTS, 1, 1)), g_state)
    return discriminator, d_state, fake, real_images()


@functools.cache
def script(half: bool) -> Script:
    (generator, g_state), (discriminator, d_state) = models()
    optimizers = [half_optimizer(optax.adam(2e-3, b1=0.5, b2=0.999), half) for _ in range(2)]
    g_step = step_of(loss_fn, optimizers[0], half)
    d_step = step_of(discriminator_loss, optimizers[1], half)
    opt_states = [
        opt.init(eqx.filter(model, eqx.is_array))
        for opt, model in zip(optimizers, (generator, discriminator), strict=True)
    ]

    @eqx.filter_jit
    def train_step(state: Any, real: jax.Array) -> Any:
        (generator, discriminator), (g_state, d_state), (g_opt, d_opt), key = state
        key, fake_key, noise_key = jr.split(key, 3)
        noise = jr.normal(fake_key, (len(real), LATENTS, 1, 1))
        fake, _ = batched(generator, noise, g_state)
        d_loss, discriminator, d_state, d_opt = d_step(discriminator, d_state, d_opt, fake, real)
        noise = jr.normal(noise_key, (len(real), LATENTS, 1, 1))
        states = g_state, d_state
        _, generator, states, g_opt = g_step(generator, states, g_opt, discriminator, noise)
        return ((generator, discriminator), states, (g_opt, d_opt), key), d_loss

    state = (generator, discriminator), (g_state, d_state), tuple(opt_states), jr.key(2)
    return Script(state, train_step, real_images())
