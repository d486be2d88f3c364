"""A translation model in flax linen, as wmt's: encoder and decoder, label smoothing, `jt.train_step`."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from scripts import Script, half_optimizer

import jmp_train as jt


@struct.dataclass
class Config:
    vocab: int = 24
    width: int = 32
    heads: int = 2
    layers: int = 1
    dropout: float = 0.1
    dtype: Any = jnp.float32


def sinusoidal(length: int, width: int) -> np.ndarray:
    position = np.arange(length)[:, None]
    rate = np.exp(np.arange(0, width, 2) * -(np.log(10000.0) / width))
    return np.concatenate([np.sin(position * rate), np.cos(position * rate)], -1)[None]


class Mlp(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        cfg = self.config
        dense = functools.partial(nn.Dense, dtype=cfg.dtype, bias_init=nn.initializers.normal(1e-6))
        return dense(cfg.width)(nn.relu(dense(4 * cfg.width)(x)))


class Attention(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, memory: jax.Array, mask: Any, train: bool) -> jax.Array:
        cfg = self.config
        return nn.MultiHeadDotProductAttention(
            num_heads=cfg.heads,
            dtype=cfg.dtype,
            use_bias=False,
            dropout_rate=cfg.dropout,
            deterministic=not train,
        )(x, memory, mask=mask)


class EncoderBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: jax.Array, train: bool) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.config.dtype)
        y = norm()(x)
        x = x + Attention(self.config)(y, y, mask, train)
        return x + Mlp(self.config)(norm()(x))


class DecoderBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, encoded: jax.Array, mask: Any, cross_mask: Any, train: bool) -> jax.Array:
        norm = functools.partial(nn.LayerNorm, dtype=self.config.dtype)
        y = norm()(x)
        x = x + Attention(self.config)(y, y, mask, train)
        x = x + Attention(self.config)(norm()(x), encoded, cross_mask, train)
        return x + Mlp(self.config)(norm()(x))


class Transformer(nn.Module):
    config: Config

    def setup(self) -> None:
        cfg = self.config
        self.embed = nn.Embed(cfg.vocab, cfg.width, embedding_init=nn.initializers.normal(1.0))
        self.encoder = [nn.remat(EncoderBlock, static_argnums=3)(cfg) for _ in range(cfg.layers)]
        self.decoder = [DecoderBlock(cfg) for _ in range(cfg.layers)]
        self.encoder_norm = nn.LayerNorm(dtype=cfg.dtype)
        self.decoder_norm = nn.LayerNorm(dtype=cfg.dtype)
        self.dropout = nn.Dropout(cfg.dropout)

    def embedded(self, tokens: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        y = self.embed(tokens) + jnp.asarray(sinusoidal(tokens.shape[1], cfg.width), jnp.float32)
        return self.dropout(y, deterministic=not train).astype(cfg.dtype)

    def __call__(self, inputs: jax.Array, targets: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        mask = nn.make_attention_mask(inputs > 0, inputs > 0, dtype=cfg.dtype)
        y = self.embedded(inputs, train)
        for block in self.encoder:
            y = block(y, mask, train)
        encoded = self.encoder_norm(y)

        causal = nn.combine_masks(
            nn.make_attention_mask(targets > 0, targets > 0, dtype=cfg.dtype),
            nn.make_causal_mask(targets, dtype=cfg.dtype),
        )
        cross = nn.make_attention_mask(targets > 0, inputs > 0, dtype=cfg.dtype)
        y = self.embedded(jnp.pad(targets, ((0, 0), (1, 0)))[:, :-1], train)
        for block in self.decoder:
            y = block(y, encoded, causal, cross, train)
        y = self.decoder_norm(y)
        return self.embed.attend(y.astype(jnp.float32)) / jnp.sqrt(y.shape[-1])


MODEL = Transformer(Config())


def smoothed_cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    vocab, smoothing = logits.shape[-1], 0.1
    confidence, low = 1 - smoothing, smoothing / (vocab - 1)
    least = -(confidence * jnp.log(confidence) + (vocab - 1) * low * jnp.log(low + 1e-20))
    soft = jax.nn.one_hot(targets, vocab) * (confidence - low) + low
    loss = -jnp.sum(soft * nn.log_softmax(logits), axis=-1) - least
    weights = jnp.where(targets > 0, 1, 0).astype(jnp.float32)
    return (loss * weights).sum(), weights.sum()


def loss_fn(params: Any, model_state: Any, batch: Any, dropout_key: Any) -> Any:
    args = batch["inputs"], batch["targets"], True
    logits: Any = MODEL.apply({"params": params}, *args, rngs={"dropout": dropout_key})
    loss, weight = smoothed_cross_entropy(logits, batch["targets"])
    return loss / weight, (model_state, logits)


def padded_batch() -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(1, 24, (4, 8))
    tokens[:2, 6:] = 0
    return {"inputs": jnp.asarray(tokens), "targets": jnp.asarray(tokens[:, ::-1])}


@functools.cache
def script(half: bool) -> Script:
    batch = padded_batch()
    init = jax.jit(MODEL.init, static_argnums=3)
    params = init(jax.random.key(0), *batch.values(), False)["params"]
    adamw = optax.adamw(5e-3, b1=0.9, b2=0.98, eps=1e-9)
    tx = half_optimizer(optax.chain(optax.clip_by_global_norm(1.0), adamw), half)
    step = jax.jit(jt.train_step(loss_fn, tx, policy="autocast_float16" if half else None))

    def train_step(state: Any, batch: Any) -> Any:
        state, metrics = step(state, batch)
        return state, metrics["loss"]

    return Script(jt.TrainState.create(params, tx, rng=jax.random.key(1)), train_step, batch)


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, None, padded_batch(), jax.random.key(0)
