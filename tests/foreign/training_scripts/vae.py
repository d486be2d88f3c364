"""A variational autoencoder in flax linen, as flax's: binary digits, a sampled code, Adam."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from scripts import Script, gradients_of, half_optimizer

LATENTS, PIXELS = 4, 64


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = nn.relu(nn.Dense(32, name="fc1")(x))
        return nn.Dense(LATENTS, name="fc2_mean")(x), nn.Dense(LATENTS, name="fc2_logvar")(x)


class Decoder(nn.Module):
    @nn.compact
    def __call__(self, z: jax.Array) -> jax.Array:
        z = nn.relu(nn.Dense(32, name="fc1")(z))
        return nn.Dense(PIXELS, name="fc2")(z)


class VAE(nn.Module):
    def setup(self) -> None:
        self.encoder = Encoder()
        self.decoder = Decoder()

    def __call__(self, x: jax.Array, z_rng: jax.Array) -> Any:
        mean, logvar = self.encoder(x)
        std = jnp.exp(0.5 * logvar)
        z = mean + jax.random.normal(z_rng, logvar.shape) * std
        return self.decoder(z), mean, logvar


@jax.vmap
def kl_divergence(mean: jax.Array, logvar: jax.Array) -> jax.Array:
    return -0.5 * jnp.sum(1 + logvar - jnp.square(mean) - jnp.exp(logvar))


@jax.vmap
def binary_cross_entropy_with_logits(logits: jax.Array, labels: jax.Array) -> jax.Array:
    logits = nn.log_sigmoid(logits)
    return -jnp.sum(labels * logits + (1.0 - labels) * jnp.log(-jnp.expm1(logits)))


def loss_fn(params: Any, batch: jax.Array, z_rng: jax.Array) -> Any:
    outputs: Any = VAE().apply({"params": params}, batch, z_rng)
    recon_x, mean, logvar = outputs
    return binary_cross_entropy_with_logits(recon_x, batch).mean() + kl_divergence(mean, logvar).mean()


def digits() -> jax.Array:
    shapes = np.random.default_rng(0).random((4, PIXELS)) > 0.7
    return jnp.asarray(shapes[np.arange(16) % 4], jnp.float32)


@functools.cache
def script(half: bool) -> Script:
    key = jax.random.key(0)
    params = jax.jit(VAE().init)(key, digits(), key)["params"]
    tx = half_optimizer(optax.adam(1e-2), half)
    state = train_state.TrainState.create(apply_fn=VAE().apply, params=params, tx=tx)

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        def of_params(params: Any) -> Any:
            return loss_fn(params, batch, jax.random.fold_in(key, state.step))

        loss, grads = gradients_of(of_params, half)(state.opt_state, state.params)
        return state.apply_gradients(grads=grads), loss

    return Script(state, train_step, digits())


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, digits(), jax.random.key(0)
