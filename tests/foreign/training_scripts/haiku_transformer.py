"""A language model in haiku, as its transformer example's: by `hk.mixed_precision` with this library's policies."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from scripts import Script, gradients_of, half_optimizer

import jmp_train as jt

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 24, 32, 2, 1, 8


def layer_norm(x: jax.Array) -> jax.Array:
    return hk.LayerNorm(axis=-1, create_scale=True, create_offset=True)(x)


class Transformer(hk.Module):
    def __call__(self, embeddings: jax.Array, mask: jax.Array, is_training: bool) -> jax.Array:
        rate = 0.1 if is_training else 0.0
        init = hk.initializers.VarianceScaling(2 / LAYERS)
        causal = np.tril(np.ones((1, 1, LENGTH, LENGTH)))
        mask = mask[:, None, None, :] * causal
        h = embeddings
        for _ in range(LAYERS):
            attention = hk.MultiHeadAttention(num_heads=HEADS, key_size=WIDTH // HEADS, model_size=WIDTH, w_init=init)
            h_norm = layer_norm(h)
            h_attn = attention(h_norm, h_norm, h_norm, mask=mask)
            h = h + hk.dropout(hk.next_rng_key(), rate, h_attn)
            dense = hk.Sequential([hk.Linear(4 * WIDTH, w_init=init), jax.nn.gelu, hk.Linear(WIDTH, w_init=init)])
            h = h + hk.dropout(hk.next_rng_key(), rate, dense(layer_norm(h)))
        return layer_norm(h)


class LanguageModel(hk.Module):
    def __call__(self, tokens: jax.Array, is_training: bool = True) -> jax.Array:
        embed_init = hk.initializers.TruncatedNormal(stddev=0.02)
        embed = hk.Embed(VOCAB, embed_dim=WIDTH, w_init=embed_init)
        positions = hk.get_parameter("positions", [LENGTH, WIDTH], init=embed_init)
        h = Transformer()(embed(tokens) + positions, tokens > 0, is_training)
        return hk.Linear(VOCAB)(h)


NET = hk.transform(lambda tokens: LanguageModel()(tokens))


@contextmanager
def mixed_precision() -> Iterator[None]:
    """Half precision, but for norms: haiku's divide by the standard deviation in the dtype of their input."""
    half: Any = jt.get_policy("params=float32,compute=float16,output=float32")
    norms: Any = jt.get_policy("params=float32,compute=float32,output=float16")
    hk.mixed_precision.set_policy(LanguageModel, half)
    hk.mixed_precision.set_policy(hk.LayerNorm, norms)
    try:
        yield
    finally:
        hk.mixed_precision.clear_policy(LanguageModel)
        hk.mixed_precision.clear_policy(hk.LayerNorm)


def loss_fn(params: hk.Params, key: jax.Array, batch: Any) -> jax.Array:
    logits = NET.apply(params, key, batch["obs"])
    targets = jax.nn.one_hot(batch["target"], VOCAB)
    log_likelihood = jnp.sum(targets * jax.nn.log_softmax(logits), axis=-1)
    mask = jnp.greater(batch["obs"], 0)
    return -jnp.sum(log_likelihood * mask) / jnp.sum(mask)


def sequences() -> dict[str, jax.Array]:
    tokens = np.random.default_rng(0).integers(1, VOCAB, (4, LENGTH + 1))
    return {"obs": jnp.asarray(tokens[:, :-1]), "target": jnp.asarray(tokens[:, 1:])}


@functools.cache
def script(half: bool) -> Script:
    key = jax.random.PRNGKey(0)
    params = jax.jit(NET.init)(key, sequences()["obs"])
    optimizer = half_optimizer(optax.chain(optax.clip_by_global_norm(0.5), optax.adam(5e-3, 0.9, 0.99)), half)

    def update(state: Any, batch: Any) -> Any:
        key, new_key = jax.random.split(state["rng"])
        params, opt_state = state["params"], state["opt_state"]
        loss, grads = gradients_of(loss_fn, half, policy=None)(opt_state, params, key, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
        return {"params": params, "opt_state": opt_state, "rng": new_key, "step": state["step"] + 1}, loss

    state = {"params": params, "opt_state": optimizer.init(params), "rng": key, "step": 0}
    compiled = jax.jit(update)
    if half:  # haiku looks at the policy when it traces
        with mixed_precision():
            compiled = compiled.lower(state, sequences()).compile()
            state = jax.tree.map(jnp.asarray, state)
    return Script(state, compiled, sequences())


def loss_args() -> tuple[Any, ...]:
    return script(True).state["params"], jax.random.PRNGKey(0), sequences()
