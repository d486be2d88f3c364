"""Models in equinox: heights on a map, and patches of images as code words."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax

from rescue_models.model import Batch, Model


class RadialBasis(eqx.Module):
    """Interpolates between learned centers, with Gaussians of the distances to them."""

    centers: jax.Array
    head: eqx.nn.Linear
    reach: float

    def __call__(self, places: jax.Array) -> jax.Array:
        """Returns heights [b] at places [b, 2]."""
        squares = (places**2).sum(-1)[:, None] + (self.centers**2).sum(-1)
        with jax.named_scope("products"):
            products = places @ self.centers.T  # guilty: above 65504 beyond 250 kilometers
        distances = jnp.maximum(squares - 2 * products, 0)
        return jax.vmap(self.head)(jnp.exp(-distances / (2 * self.reach**2)))[:, 0]


def terrain(seed: int) -> Model:
    """Heights at places in kilometers: far distances are 0 in float16, and nothing says so."""
    random = np.random.default_rng(0)
    peaks, heights = random.uniform(0, 500, (40, 2)), random.normal(0, 1, 40)

    def batch() -> Batch:
        places = random.uniform(0, 500, (128, 2))
        distances = np.linalg.norm(places[:, None] - peaks, axis=-1)
        height = np.exp(-((distances / 60) ** 2)) @ heights
        return jnp.asarray(places, jnp.float32), jnp.asarray(height, jnp.float32)

    def loss_fn(params: RadialBasis, batch: Batch) -> jax.Array:
        places, height = batch
        return jnp.mean((eqx.combine(params, static)(places) - height) ** 2)

    centers = 500 * jr.uniform(jr.key(seed), (256, 2))
    model = RadialBasis(centers, eqx.nn.Linear(256, 1, key=jr.key(seed + 100)), 40.0)
    params, static = eqx.partition(model, eqx.is_array)
    batches = tuple(batch() for _ in range(16))
    return Model(loss_fn, params, batches, optax.adam(1e-2), "products", 300)


class Codebook(eqx.Module):
    """An autoencoder of patches by a soft choice among code words."""

    words: jax.Array
    decoder: eqx.nn.MLP

    def __call__(self, patches: jax.Array) -> jax.Array:
        """Returns patches [b, 48] like those given."""
        squares = (patches**2).sum(-1)[:, None] + (self.words**2).sum(-1)
        with jax.named_scope("distances"):
            distances = squares - 2 * patches @ self.words.T  # guilty: 48 products of up to 65,025
        chosen = jax.nn.softmax(-distances / 2000)
        return 255 * jax.nn.sigmoid(jax.vmap(self.decoder)(chosen))


def patches(seed: int) -> Model:
    """Patches of pixels from 0 to 255 as code words, whose distances overflow in float16."""
    random = np.random.default_rng(0)
    textures = random.uniform(0, 255, (16, 48))

    def batch() -> Batch:
        texture = textures[random.integers(len(textures), size=64)]
        return (jnp.asarray(np.clip(texture + random.normal(0, 10, texture.shape), 0, 255).round(), jnp.float32),)

    def loss_fn(params: Codebook, batch: Batch) -> jax.Array:
        (pixels,) = batch
        return jnp.mean((eqx.combine(params, static)(pixels) / 255 - pixels / 255) ** 2)

    batches = tuple(batch() for _ in range(8))
    words = jr.choice(jr.key(seed), jnp.concatenate([pixels for (pixels,) in batches]), (24,), replace=False)
    decoder = eqx.nn.MLP(24, 48, 32, 1, jnp.tanh, key=jr.key(seed))
    params, static = eqx.partition(Codebook(words, decoder), eqx.is_array)
    return Model(loss_fn, params, batches, optax.adam(1e-2), "distances", 200)


MODELS = (terrain, patches)
