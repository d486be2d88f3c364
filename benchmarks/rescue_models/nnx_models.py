"""Models in flax nnx: winds of pressures in pascals, Gram matrices of pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from rescue_models.model import Batch, Model


class PressureAnalysis(nnx.Module):
    """Fills in a field of surface pressure, in pascals, that stations observe here and there."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(2, width, (5, 5), rngs=rngs)
        self.second = nnx.Conv(width, width, (5, 5), rngs=rngs)
        self.last = nnx.Conv(width, 1, (3, 3), rngs=rngs)

    def __call__(self, observed: jax.Array, seen: jax.Array) -> jax.Array:
        """Returns pressures [b, h, w] of those observed where `seen` is 1."""
        x = jnp.stack([(observed - 101_325) / 1000 * seen, seen], -1)
        x = nnx.gelu(self.second(nnx.gelu(self.first(x))))
        return 101_325 + 1000 * self.last(x)[..., 0]


def winds(pressure: jax.Array, spacing: float = 50_000.0) -> jax.Array:
    """Returns geostrophic winds, in meters a second: central differences of pressure as a convolution."""
    stencil = np.zeros((3, 3, 1, 2), np.float32)
    stencil[1, :, 0, 0], stencil[:, 1, 0, 1] = (-1, 0, 1), (1, 0, -1)
    with jax.named_scope("differences"):
        dimensions = ("NHWC", "HWIO", "NHWC")
        slopes = jax.lax.conv_general_dilated(  # guilty: pressures above 65504, of which small differences matter
            pressure[..., None], jnp.asarray(stencil), (1, 1), "VALID", dimension_numbers=dimensions
        )
    return slopes / (2 * spacing * 1.2 * 1e-4)


def pressures(seed: int) -> Model:
    """Fields of pressure in pascals, which overflow in float16, that are to have the winds that blow."""
    random = np.random.default_rng(0)
    row, column = np.mgrid[:16, :16] / 16
    graph, params = nnx.split(PressureAnalysis(12, nnx.Rngs(seed)))

    def batch() -> Batch:
        place = random.uniform(0, 1, (2, 8, 2, 1, 1))
        depth = random.normal(0, 1500, (8, 2, 1, 1))
        lows = depth * np.exp(-8 * ((row - place[0]) ** 2 + (column - place[1]) ** 2))
        pressure = 101_325 + lows.sum(1)
        seen = random.uniform(size=pressure.shape) < 0.3
        return tuple(jnp.asarray(x, jnp.float32) for x in (pressure, seen))

    def loss_fn(params: nnx.State, batch: Batch) -> jax.Array:
        pressure, seen = batch
        predicted = nnx.merge(graph, params)(pressure, seen)
        blown = jnp.mean(((winds(predicted) - winds(pressure)) / 10) ** 2)
        return blown + jnp.mean(((predicted - pressure) / 1000) ** 2)

    batches = tuple(batch() for _ in range(8))
    return Model(loss_fn, params, batches, optax.adam(1e-2), "differences", 150)


class Painter(nnx.Module):
    """Repaints pixels from 0 to 255."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        self.into = nnx.Conv(3, width, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(width, num_groups=4, rngs=rngs)
        self.out = nnx.Conv(width, 3, (3, 3), rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        """Returns images [b, h, w, 3] like those given."""
        return 255 * nnx.sigmoid(self.out(nnx.relu(self.norm(self.into(image)))))


def gram(features: jax.Array) -> jax.Array:
    """Returns the products of features [b, h, w, c] with each other, averaged over all places: their style."""
    flat = features.reshape(len(features), -1, features.shape[-1])
    with jax.named_scope("gram"):
        products = flat.swapaxes(1, 2) @ flat  # guilty: a sum over all places before it is divided
    return products / flat.shape[1]


def styles(seed: int) -> Model:
    """Style transfer (Johnson et al., 2016) on pixels from 0 to 255: Gram matrices of features overflow."""
    random = np.random.default_rng(0)
    graph, params = nnx.split(Painter(16, nnx.Rngs(seed)))
    filters = jnp.asarray(random.normal(size=(3, 3, 3, 12)) / 27**0.5, jnp.float32)
    stripes = 128 + 100 * np.sin(np.arange(16)[:, None, None] * np.array([1.0, 1.5, 2.0]) + np.zeros((16, 1)))

    def features(image: jax.Array) -> jax.Array:
        return nnx.relu(
            jax.lax.conv_general_dilated(image, filters, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        )

    def batch() -> Batch:
        images = random.uniform(0, 255, (8, 1, 1, 3)) + random.normal(0, 20, (8, 16, 16, 3))
        return (jnp.asarray(np.clip(images, 0, 255).round(), jnp.float32),)

    def loss_fn(params: nnx.State, batch: Batch) -> jax.Array:
        (image,) = batch
        painted = nnx.merge(graph, params)(image)
        content = jnp.mean(((painted - image) / 255) ** 2)
        style = gram(features(painted)) - gram(features(jnp.asarray(stripes[None], jnp.float32)))
        return content + jnp.mean((style / 255**2) ** 2)

    batches = tuple(batch() for _ in range(8))
    return Model(loss_fn, params, batches, optax.adam(1e-2), "gram", 200)


MODELS = (pressures, styles)
