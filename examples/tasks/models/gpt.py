"""A decoder-only transformer for text in flax nnx, and generation with a cache of keys and values.

It has RMSNorm before each part of a block, rotary positions, grouped-query attention, SwiGLU, no biases, and an
embedding matrix shared with the output.
"""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.policies.autocasting import autocast

from .causal_attention import Rotation, causal_attention, rotated, rotations
from .rounded_once import gated, unrounded_product, upcast
from .token_losses import TokenLosses, token_losses

_EPSILON = 1e-5  # of the norms
_EMBEDDING_STD = 0.02  # GPT-2's


@dataclasses.dataclass(frozen=True)
class GPTConfig:
    """The sizes of a `GPT`.

    Attributes:
      width: features of a token.
      depth: number of blocks.
      heads: number of query heads; they divide the width into an even number of features each.
      kv_heads: number of key and value heads; they divide the heads.
      mlp: features within a block's SwiGLU.
      vocabulary: number of tokens.
      remat: True if the gradient recomputes the blocks, which saves memory and costs time.
    """

    width: int
    depth: int
    heads: int
    kv_heads: int
    mlp: int
    vocabulary: int = 256
    remat: bool = False

    @property
    def head_size(self) -> int:
        """Features per head."""
        return self.width // self.heads


class Cache(NamedTuple):
    """Keys and values of the tokens so far.

    Attributes:
      keys: keys of each block, floating [batch, size, kv_heads, head_size].
      values: values, likewise.
      length: number of tokens in the cache, int32 []; the rest of the arrays is unused.
    """

    keys: tuple[jax.Array, ...]
    values: tuple[jax.Array, ...]
    length: jax.Array


class Generated(NamedTuple):
    """The result of `generate`.

    Attributes:
      tokens: int32 [batch, n].
      log_probs: log-probability of each token, float32 [batch, n].
    """

    tokens: jax.Array
    log_probs: jax.Array


# Returns the attention output, given queries [batch, tokens, heads, head_size], and keys and values of fewer heads.
Attend: TypeAlias = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


class RMSNorm(nnx.Module):
    """Divides by the root of the mean square, computed in float32, and multiplies by a learned scale."""

    def __init__(self, width: int) -> None:
        self.scale = nnx.Param(jnp.ones(width))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns floating [..., width] of x's dtype."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt((y * y).mean(-1, keepdims=True) + _EPSILON)
        return (y * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.heads, self.kv_heads, self.head_size = config.heads, config.kv_heads, config.head_size
        self.query = _linear(config.width, self.heads * self.head_size, rngs)
        self.key = _linear(config.width, self.kv_heads * self.head_size, rngs)
        self.value = _linear(config.width, self.kv_heads * self.head_size, rngs)
        self.out = _linear(self.heads * self.head_size, config.width, rngs, 2 * config.depth)

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attend = causal_attention) -> jax.Array:
        """Returns the attention output [batch, tokens, width] of each token over the tokens up to it.

        Args:
          x: floating [batch, tokens, width].
          rotation: rotation of the tokens' positions.
          attend: see `Attend`.
        """
        # Rotated here, and rounded later by the attention.
        query = unrounded_product(x, self.query.kernel[...]).reshape(*x.shape[:2], self.heads, self.head_size)
        key = unrounded_product(x, self.key.kernel[...]).reshape(*x.shape[:2], self.kv_heads, self.head_size)
        value = self.value(x).reshape(*x.shape[:2], self.kv_heads, self.head_size)
        attended = attend(rotated(query, rotation), rotated(key, rotation), value)
        return self.out(attended.reshape(*x.shape[:2], -1))


class SwiGLU(nnx.Module):
    """A linear layer of the product of two, one of them with SiLU."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.gate = _linear(config.width, config.mlp, rngs)
        self.up = _linear(config.width, config.mlp, rngs)
        self.down = _linear(config.mlp, config.width, rngs, 2 * config.depth)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns floating [..., width]."""
        return self.down(gated(self.gate(x), self.up(x)))


class Block(nnx.Module):
    """Attention and SwiGLU, each with a norm before it and a residual connection."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.attention_norm = RMSNorm(config.width)
        self.attention = Attention(config, rngs)
        self.mlp_norm = RMSNorm(config.width)
        self.mlp = SwiGLU(config, rngs)

    def __call__(self, x: jax.Array, rotation: Rotation, attend: Attend = causal_attention) -> jax.Array:
        """Returns tokens [batch, tokens, width]; see `Attention`."""
        with jax.named_scope("attention"):
            x = x + self.attention(self.attention_norm(x), rotation, attend)
        with jax.named_scope("mlp"):
            return x + self.mlp(self.mlp_norm(x))


class GPT(nnx.Module):
    """The transformer. It sets no dtype: its parameters determine it, so a policy decides.

    Args:
      config: its sizes.
      rngs: streams for the initial values.
    """

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs) -> None:
        self.config = config
        embedding = jax.random.normal(rngs.params(), (config.vocabulary, config.width))
        self.embedding = nnx.Param(_EMBEDDING_STD * embedding)
        self.blocks = nnx.List([Block(config, rngs) for _ in range(config.depth)])
        self.norm = RMSNorm(config.width)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Returns the logits of each next token, [batch, tokens, vocabulary].

        Args:
          tokens: int32 [batch, tokens], at the positions from 0.
        """
        return self._logits(self._features(tokens))

    def losses(self, tokens: jax.Array, labels: jax.Array) -> TokenLosses:
        """Returns the cross-entropy of each next token, without storing all logits; see `token_losses`.

        Args:
          tokens: int32 [batch, tokens], at the positions from 0.
          labels: the next tokens, of the same shape.
        """
        x = self._features(tokens)
        with jax.named_scope("head"):
            return token_losses(self.norm(x), self.embedding[...], labels)

    def _features(self, tokens: jax.Array) -> jax.Array:
        """Returns the features after the last block, [batch, tokens, width]."""
        x = self._embedded(tokens)
        rotation = rotations(jnp.arange(tokens.shape[1]), self.config.head_size)

        def call(block: Block, x: jax.Array, rotation: Rotation) -> jax.Array:
            return block(x, rotation)

        call = nnx.remat(call) if self.config.remat else call
        for number, block in enumerate(self.blocks):
            with jax.named_scope(f"block_{number}"):
                x = call(block, x, rotation)
        return x

    def extend(self, tokens: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        """Returns the logits [batch, tokens, vocabulary] of further tokens, and the cache with them.

        Args:
          tokens: int32 [batch, tokens], at most as many as fit into the cache.
          cache: cache of the tokens before, see `empty_cache`.
        """
        x = self._embedded(tokens)
        rotation = rotations(cache.length + jnp.arange(tokens.shape[1]), self.config.head_size)
        all_keys, all_values = list(cache.keys), list(cache.values)
        seen = jnp.arange(all_keys[0].shape[1]) <= cache.length + jnp.arange(tokens.shape[1])[:, None]
        for number, block in enumerate(self.blocks):

            def attend(query: jax.Array, key: jax.Array, value: jax.Array, number: int = number) -> jax.Array:
                keys, values = all_keys[number], all_values[number]
                keys = jax.lax.dynamic_update_slice_in_dim(keys, key.astype(keys.dtype), cache.length, axis=1)
                values = jax.lax.dynamic_update_slice_in_dim(values, value.astype(values.dtype), cache.length, axis=1)
                all_keys[number], all_values[number] = keys, values
                return cached_attention(query, keys, values, seen)

            with jax.named_scope(f"block_{number}"):
                x = block(x, rotation, attend)
        return self._logits(x), Cache(tuple(all_keys), tuple(all_values), cache.length + tokens.shape[1])

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        embedding = self.embedding[...]
        # In float32, so that the gradients of a frequent token are summed in float32.
        return upcast(embedding)[tokens].astype(embedding.dtype)

    def _logits(self, x: jax.Array) -> jax.Array:
        with jax.named_scope("head"):
            return self.norm(x) @ self.embedding[...].T


def _linear(inputs: int, outputs: int, rngs: nnx.Rngs, divisor: int = 1) -> nnx.Linear:
    """Returns a linear layer whose initial variance is one over inputs * divisor."""
    init = nnx.initializers.normal(1 / math.sqrt(inputs * divisor))
    return nnx.Linear(inputs, outputs, use_bias=False, kernel_init=init, rngs=rngs)


def cached_attention(query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the attention output [batch, tokens, heads, head_size], by `jax.nn.dot_product_attention`.

    Args:
      query: floating [batch, tokens, heads, head_size].
      key: floating [batch, others, kv_heads, head_size].
      value: the same shape, in the key's dtype.
      seen: True for the others that a token attends to, bool [tokens, others].
    """
    attend = partial(jax.nn.dot_product_attention, mask=seen[None, None])
    dtype = key.dtype
    if dtype not in (jnp.float16, jnp.bfloat16):
        return attend(query, key, value)
    # For half-precision inputs it requests precisions that CPUs lack for float16. Traced in float32 it does not, and
    # autocast makes the products half precision.
    full = [x.astype(jnp.float32) for x in (query, key, value)]
    return autocast(attend, dtype)(*full)


def empty_cache(model: GPT, batch: int, size: int) -> Cache:
    """Returns an empty cache in the dtype of the model's embedding.

    Args:
      model: the transformer.
      batch: number of texts.
      size: number of tokens per text that fit into it.
    """
    config = model.config
    shape = (batch, size, config.kv_heads, config.head_size)
    zeros = tuple(jnp.zeros(shape, model.embedding[...].dtype) for _ in range(config.depth))
    return Cache(zeros, zeros, jnp.int32(0))


def generate(model: GPT, prompt: jax.Array, n: int, rng: jax.Array | None = None) -> Generated:
    """Returns n further tokens of each text, and their log-probabilities.

    It is a pure function, for `jax.jit`, `apply_policy` and `autocast`.

    Args:
      model: the transformer.
      prompt: int32 [batch, tokens], at least one token.
      n: number of tokens, at least 1.
      rng: random key for sampling; None for the most likely tokens.

    Example:
      >>> model = GPT(GPTConfig(width=8, depth=1, heads=2, kv_heads=1, mlp=16), nnx.Rngs(0))
      >>> generate(model, jnp.array([[104, 105]]), 3, jax.random.key(0)).tokens.shape
      (1, 3)
    """
    logits, cache = model.extend(prompt, empty_cache(model, len(prompt), prompt.shape[1] + n))
    keys = jax.random.split(jax.random.key(0) if rng is None else rng, n)

    def step(carry: tuple[jax.Array, Cache], key: jax.Array) -> tuple[tuple[jax.Array, Cache], Generated]:
        logits, cache = carry
        log_probs = jax.nn.log_softmax(logits.astype(jnp.float32))
        token = log_probs.argmax(-1) if rng is None else jax.random.categorical(key, log_probs)
        chosen = jnp.take_along_axis(log_probs, token[:, None], axis=-1)[:, 0]
        logits, cache = model.extend(token[:, None], cache)
        return (logits[:, -1], cache), Generated(token, chosen)

    _, (tokens, log_probs) = jax.lax.scan(step, (logits[:, -1], cache), keys)
    return Generated(tokens.T, log_probs.T)
