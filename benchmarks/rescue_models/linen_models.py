"""Models in flax linen: attention over long documents, sounds as 16-bit samples, hours of a year."""

from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flax import linen as nn

from rescue_models.model import Batch, Model


class LinearAttention(nn.Module):
    """Attention whose cost is linear in the length (Katharopoulos et al., 2020)."""

    width: int
    value_width: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns what each place [b, l] attends to."""
        query, key = (nn.elu(nn.Dense(self.width, name=name)(x)) + 1 for name in ("query", "key"))
        value = nn.Dense(self.value_width, name="value")(x)
        with jax.named_scope("averages"):
            weights = jnp.einsum("bld,bd->bl", query, key.sum(1))  # guilty: length times width, above 65504
            sums = jnp.einsum("bld,bdv->blv", query, jnp.einsum("bld,blv->bdv", key, value))  # guilty
        return sums / weights[..., None]


class DocumentClassifier(nn.Module):
    """Classifies documents by what attention finds at their end."""

    classes: int

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns logits [b, classes]."""
        x = nn.Embed(64, 32)(tokens)
        return nn.Dense(self.classes)(LinearAttention(128, 16)(x)[:, -1])


def long_documents(seed: int) -> Model:
    """Topics of documents of 1,024 tokens, by linear attention: the sum of its weights overflows, so all is 0."""
    random = np.random.default_rng(0)
    topics = random.dirichlet(np.full(64, 0.3), size=8)
    model = DocumentClassifier(len(topics))

    def batch() -> Batch:
        labels = random.integers(len(topics), size=2)
        mixed = 0.5 / 64 + 0.5 * topics[labels]
        tokens = np.stack([random.choice(64, 1024, p=p / p.sum()) for p in mixed])
        return jnp.asarray(tokens), jnp.asarray(labels)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        tokens, labels = batch
        return _cross_entropy(model.apply(params, tokens), labels)

    batches = tuple(batch() for _ in range(8))
    params = model.init(jr.key(seed), batches[0][0])
    return Model(loss_fn, params, batches, optax.adam(1e-2), "averages", 80)


def _cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


class LogMel(nn.Module):
    """Log-mel energies of frames, the discrete Fourier transform as products with its matrix."""

    bands: int = 16

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        """Returns energies [b, frames, bands]."""
        length = frames.shape[-1]
        angles = 2 * np.pi * np.outer(np.arange(length), np.arange(length // 2 + 1)) / length
        window = np.hanning(length)[:, None]
        centers = np.linspace(0, length // 2, self.bands + 2)
        bins = np.arange(length // 2 + 1)[:, None]
        mel = np.clip(1 - np.abs(bins - centers[1:-1]) / (centers[1] - centers[0]), 0, None)
        real = frames @ jnp.asarray(window * np.cos(angles), jnp.float32)  # guilty: 16-bit samples add up
        imaginary = frames @ jnp.asarray(window * np.sin(angles), jnp.float32)  # guilty
        power = real**2 + imaginary**2
        return jnp.log(power @ jnp.asarray(mel, jnp.float32) + 1)  # guilty: powers up to 1e11


class SoundClassifier(nn.Module):
    """Classifies sounds by their log-mel energies."""

    @nn.compact
    def __call__(self, frames: jax.Array) -> jax.Array:
        """Returns logits [b, 8]."""
        x = LogMel()(frames) / 10 - 1
        x = nn.relu(nn.Conv(32, (3,))(x)).mean(1)
        return nn.Dense(8)(x)


def sounds(seed: int) -> Model:
    """Pitches of 16-bit samples, by log-mel energies: their spectrum overflows in float16."""
    random = np.random.default_rng(0)
    model = SoundClassifier()

    def batch() -> Batch:
        labels = random.integers(8, size=16)
        time = np.arange(16 * 64)
        pitch = 0.02 * 2 ** (labels / 4)[:, None]
        phases = random.uniform(0, 2 * np.pi, (3, 16, 1))
        wave = np.sum([np.sin(2 * np.pi * pitch * k * time + phases[k - 1]) / k for k in (1, 2, 3)], axis=0)
        loudness = 10 ** random.uniform(2, 4, (16, 1))
        samples = np.round(loudness * wave + random.normal(0, 30, wave.shape))
        return jnp.asarray(samples.reshape(16, 16, 64), jnp.float32), jnp.asarray(labels)

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        frames, labels = batch
        return _cross_entropy(model.apply(params, frames), labels)

    batches = tuple(batch() for _ in range(8))
    params = model.init(jr.key(seed), batches[0][0])
    return Model(loss_fn, params, batches, optax.adam(1e-2), "LogMel", 150)


class Load(nn.Module):
    """Electric load by the hour of the year and the temperature, of random Fourier features (Tancik et al., 2020)."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns loads [b] of hours and temperatures [b, 2]."""
        random = np.random.default_rng(1)
        periods = np.array([8760, 4380, 168, 84, 24, 12, 8, 6])
        cycles = np.stack([1 / periods, random.normal(0, 0.02, len(periods))])
        with jax.named_scope("phase"):
            phase = x @ jnp.asarray(2 * np.pi * cycles, jnp.float32)  # guilty: hours count to 8,760
        x = jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1)
        x = nn.gelu(nn.Dense(32)(x))
        return nn.Dense(1)(nn.gelu(nn.Dense(32)(x)))[..., 0]


def hours(seed: int) -> Model:
    """Electric load by the hour of the year: float16 has no phase of a day left in autumn."""
    random = np.random.default_rng(0)
    model = Load()

    def batch() -> Batch:
        hour, temperature = random.uniform(0, 8760, 64), random.normal(0, 8, 64)
        day, week, year = (2 * np.pi * hour / period for period in (24, 168, 8760))
        load = np.sin(day) + 0.5 * np.cos(2 * day + 1) + 0.4 * np.sin(week) + 0.3 * np.cos(year)
        return (
            jnp.asarray(np.stack([hour, temperature], -1), jnp.float32),
            jnp.asarray(load + 0.02 * temperature, jnp.float32),
        )

    def loss_fn(params: Any, batch: Batch) -> jax.Array:
        x, load = batch
        predicted: Any = model.apply(params, x)
        return jnp.mean((predicted - load) ** 2)

    batches = tuple(batch() for _ in range(16))
    params = model.init(jr.key(seed), batches[0][0])
    return Model(loss_fn, params, batches, optax.adam(1e-2), "phase", 300)


MODELS = (long_documents, sounds, hours)
