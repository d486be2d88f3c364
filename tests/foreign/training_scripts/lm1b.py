"""A decoder-only language model in flax linen, as lm1b's: packed sequences, flax's TrainState, dropout."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import struct
from flax.training import train_state
from scripts import Script, gradients_of, half_optimizer


@struct.dataclass
class Config:
    vocab: int = 32
    width: int = 32
    heads: int = 2
    layers: int = 1
    max_len: int = 12
    dropout: float = 0.1
    dtype: Any = jnp.float32
    kernel_init: Any = struct.field(pytree_node=False, default=nn.initializers.xavier_uniform())


class MlpBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, deterministic: bool) -> jax.Array:
        cfg = self.config
        y = nn.Dense(4 * cfg.width, dtype=cfg.dtype, kernel_init=cfg.kernel_init)(x)
        y = nn.Dropout(cfg.dropout)(nn.relu(y), deterministic=deterministic)
        y = nn.Dense(cfg.width, dtype=cfg.dtype, kernel_init=cfg.kernel_init)(y)
        return nn.Dropout(cfg.dropout)(y, deterministic=deterministic)


class DecoderBlock(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, x: jax.Array, mask: Any, deterministic: bool) -> jax.Array:
        cfg = self.config
        y = nn.LayerNorm(dtype=cfg.dtype)(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=cfg.heads,
            dtype=cfg.dtype,
            qkv_features=cfg.width,
            kernel_init=cfg.kernel_init,
            use_bias=False,
            broadcast_dropout=False,
            dropout_rate=cfg.dropout,
            deterministic=deterministic,
        )(y, y, mask=mask)
        x = x + nn.Dropout(cfg.dropout)(y, deterministic=deterministic)
        return x + MlpBlock(cfg)(nn.LayerNorm(dtype=cfg.dtype)(x), deterministic)


class TransformerLM(nn.Module):
    config: Config

    @nn.compact
    def __call__(self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, train: bool) -> jax.Array:
        cfg = self.config
        mask = nn.combine_masks(
            nn.make_causal_mask(tokens, dtype=cfg.dtype),
            nn.make_attention_mask(segments, segments, jnp.equal, dtype=cfg.dtype),
        )
        shifted = jnp.pad(tokens, ((0, 0), (1, 0)))[:, :-1]
        embed = nn.Embed(cfg.vocab, cfg.width, embedding_init=nn.initializers.normal(1.0))
        table = self.param("positions", nn.initializers.normal(0.02), (cfg.max_len, cfg.width))
        y = embed(shifted.astype("int32")) + jnp.take(table, positions, axis=0)
        y = nn.Dropout(cfg.dropout)(y, deterministic=not train).astype(cfg.dtype)
        for _ in range(cfg.layers):
            y = DecoderBlock(cfg)(y, mask, not train)
        y = nn.LayerNorm(dtype=cfg.dtype)(y)
        return embed.attend(y.astype(jnp.float32)) / np.sqrt(cfg.width)


MODEL = TransformerLM(Config())


def weighted_cross_entropy(logits: jax.Array, targets: jax.Array, weights: jax.Array) -> jax.Array:
    soft = jax.nn.one_hot(targets, logits.shape[-1]) * 0.9 + 0.1 / logits.shape[-1]
    loss = -jnp.sum(soft * nn.log_softmax(logits), axis=-1) * weights
    return loss.sum() / weights.sum()


def loss_fn(params: Any, batch: Any, dropout_key: Any) -> jax.Array:
    tokens = batch["inputs"]
    args = tokens, batch["inputs_position"], batch["inputs_segmentation"], True
    logits: Any = MODEL.apply({"params": params}, *args, rngs={"dropout": dropout_key})
    return weighted_cross_entropy(logits, tokens, jnp.where(tokens > 0, 1.0, 0.0))


def packed_batch() -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(1, 32, (4, 12))
    tokens[:, 10:] = 0
    position = np.tile([0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 0], (4, 1))
    segment = np.tile([1] * 5 + [2] * 5 + [0, 0], (4, 1))
    batch = {"inputs": tokens, "inputs_position": position, "inputs_segmentation": segment}
    return jax.tree.map(jnp.asarray, batch)


@functools.cache
def script(half: bool) -> Script:
    batch = packed_batch()
    key = jax.random.PRNGKey(0)
    params = jax.jit(MODEL.init, static_argnums=4)(key, *batch.values(), False)["params"]
    schedule = optax.join_schedules([optax.linear_schedule(0, 1e-2, 5), optax.constant_schedule(1e-2)], [5])
    tx = half_optimizer(optax.adamw(schedule, b1=0.9, b2=0.98, eps=1e-9, weight_decay=0.1), half)
    state = train_state.TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx)

    @jax.jit
    def train_step(state: Any, batch: Any) -> Any:
        dropout_key = jax.random.fold_in(key, state.step)
        loss, grads = gradients_of(loss_fn, half)(state.opt_state, state.params, batch, dropout_key)
        return state.apply_gradients(grads=grads), loss

    return Script(state, train_step, batch)


def loss_args() -> tuple[Any, ...]:
    return script(True).state.params, packed_batch(), jax.random.PRNGKey(0)
