"""Causal attention without a [tokens, tokens] array: cuDNN's flash attention on GPUs, otherwise block by block.

Also the rotary positions of its queries and keys.

The weights of a block of queries exist while it is computed, and once more for the gradient; between the two, only
each query's logsumexp is stored. Scores and the gradients of weights are float32, as are the sums of their products.

Reference: Dao, "FlashAttention-2", https://arxiv.org/abs/2307.08691; Rabe and Staats, "Self-attention Does Not Need
O(n^2) Memory", https://arxiv.org/abs/2112.05682.
"""

import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies import autocast, opaque_to_autocast

from .rounded_once import (
    LARGEST_CHUNK,
    chunk_length,
    joined,
    product,
    split,
    upcast,
    vary_alike,
    zeros_like_sums,
)

ROPE_BASE = 10_000.0
_HALVES = (jnp.float16, jnp.bfloat16)
_LARGEST_CUDNN_HEAD = 128  # on every GPU that it supports
_CUDNN_CAPABILITY = 8.0  # of Ampere


class _Heads(NamedTuple):
    """Queries [batch, tokens, kv_heads, group, size], keys and values [batch, tokens, kv_heads, size]."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def causal_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, largest_chunk: int = LARGEST_CHUNK
) -> jax.Array:
    """Returns the attention of each token to the tokens up to it, [batch, tokens, heads, head_size].

    Args:
      query: floating [batch, tokens, heads, head_size].
      key: floating [batch, tokens, kv_heads, head_size]; kv_heads divide the heads.
      value: the same shape; query and key are rounded to its dtype.
      largest_chunk: largest number of scores in memory; the number of queries per block is halved until it fits.

    Example:
      >>> x = jnp.arange(4.0).reshape(1, 4, 1, 1)
      >>> causal_attention(0 * x, x, x).ravel().tolist()
      [0.0, 0.5, 1.0, 1.5]
    """

    def run(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        in_blocks = partial(_in_blocks, largest_chunk=largest_chunk)
        if not _cudnn_serves(value):
            return in_blocks(query, key, value)
        return jax.lax.platform_dependent(query, key, value, cuda=_by_cudnn, default=in_blocks)

    return opaque_to_autocast(run)(query, key, value)


def _by_cudnn(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    query, key = query.astype(value.dtype), key.astype(value.dtype)
    return jax.nn.dot_product_attention(query, key, value, is_causal=True, implementation="cudnn")


def _cudnn_serves(value: jax.Array) -> bool:
    """Returns whether this process has a GPU whose cuDNN supports flash attention for such heads."""
    size = value.shape[-1]
    if value.dtype not in _HALVES or size % 8 or size > _LARGEST_CUDNN_HEAD or jax.default_backend() != "gpu":
        return False
    capability = getattr(jax.local_devices()[0], "compute_capability", "0")  # not a number on AMD's GPUs
    return capability.replace(".", "", 1).isdigit() and float(capability) >= _CUDNN_CAPABILITY


def _in_blocks(query: jax.Array, key: jax.Array, value: jax.Array, largest_chunk: int) -> jax.Array:
    batch, tokens, heads, size = query.shape
    length = chunk_length(tokens, batch * heads * tokens, largest_chunk)
    grouped = query.reshape(batch, tokens, key.shape[2], -1, size)
    gathered: Any = _blocks(length, *vary_alike(_Heads(upcast(grouped), upcast(key), value)))
    return gathered.reshape(query.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _blocks(length: int, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return _forward(length, query, key, value)[0]


def _forward(
    length: int, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, tuple[_Heads, jax.Array, jax.Array]]:
    query, key = query.astype(value.dtype), key.astype(value.dtype)

    def block(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, query = x
        scores = _scores(number, query, key)
        highest = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - highest)
        total = weights.sum(-1, keepdims=True)
        gathered = product("btkgs,bskd->btkgd", weights.astype(value.dtype), value) / total
        return gathered.astype(value.dtype), (highest + jnp.log(total))[..., 0]

    blocks = split(query, length)
    out, logsumexp = map(joined, jax.lax.map(block, (jnp.arange(len(blocks)), blocks)))
    return out, (_Heads(query, key, value), out, logsumexp)


def _backward(
    length: int, saved: tuple[_Heads, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    (query, key, value), out, logsumexp = saved
    dtype = query.dtype
    # The term that softmax's gradient subtracts: for each query the sum of weights times their cotangents.
    shared = (upcast(out) * upcast(cotangent)).sum(-1)

    def block(
        totals: tuple[jax.Array, jax.Array], x: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        number, query, cotangent, logsumexp, shared = x
        weights = jnp.exp(_scores(number, query, key) - logsumexp[..., None])
        of_weights = product("btkgd,bskd->btkgs", cotangent, value)
        of_scores = (weights * (of_weights - shared[..., None]) * _scale(query)).astype(dtype)
        of_key = product("btkgs,btkgd->bskd", of_scores, query)
        of_value = product("btkgs,btkgd->bskd", weights.astype(dtype), cotangent)
        of_query = product("btkgs,bskd->btkgd", of_scores, key)
        return (totals[0] + of_key, totals[1] + of_value), of_query

    zeros = zeros_like_sums(key)
    blocks = tuple(split(x, length) for x in (query, cotangent, logsumexp, shared))
    numbers = jnp.arange(len(blocks[0]))
    (of_key, of_value), of_query = jax.lax.scan(block, (zeros, zeros), (numbers, *blocks))
    return joined(of_query), of_key, of_value.astype(dtype)


_blocks.defvjp(_forward, _backward)


def _scores(number: jax.Array, query: jax.Array, key: jax.Array) -> jax.Array:
    """Returns the scores of a block's queries [batch, queries, kv_heads, group, keys], -inf for later tokens."""
    queries, keys = query.shape[1], key.shape[1]
    scores = product("btkgd,bskd->btkgs", query, key) * _scale(query)
    seen = jnp.arange(keys) <= (number * queries + jnp.arange(queries))[:, None]
    return jnp.where(seen[:, None, None], scores, -jnp.inf)


def _scale(query: jax.Array) -> float:
    return 1 / math.sqrt(query.shape[-1])


class Rotation(NamedTuple):
    """Cosines and sines of the rotary angles, float32 [tokens, head_size // 2]."""

    cos: jax.Array
    sin: jax.Array


def rotations(positions: jax.Array, head_size: int) -> Rotation:
    """Returns the rotations of rotary position embedding, float32 under every policy and autocast.

    Angles are counted in units of 2**-32 turns, so that integers hold them and whole turns wrap around. Up to position
    100,000 their error is below 1e-4, while a product of float32 numbers is off by up to 7e-3.

    Args:
      positions: int32 [tokens], from 0.
      head_size: features per head, an even number.
    """
    return Rotation(*autocast(_cos_sin, enabled=False)(positions, _units_per_position(head_size)))


def _cos_sin(positions: jax.Array, units_per_position: np.ndarray) -> tuple[jax.Array, jax.Array]:
    units = positions.astype(jnp.uint32)[:, None] * units_per_position
    signed = jax.lax.bitcast_convert_type(units, jnp.int32)  # from minus half a turn to half a turn
    angles = signed.astype(jnp.float32) * np.float32(2 * math.pi / 2**32)
    return jnp.cos(angles), jnp.sin(angles)


def _units_per_position(head_size: int) -> np.ndarray:
    """Returns the angle from one position to the next in units of 2**-32 turns, uint32 [head_size // 2]."""
    frequencies = ROPE_BASE ** -(np.arange(0, head_size, 2) / head_size)
    return np.round(frequencies * 2**32 / (2 * math.pi)).astype(np.uint32)


def rotated(x: jax.Array, rotation: Rotation) -> jax.Array:
    """Returns heads with features i and i + head_size // 2 rotated as a pair, in float32; attention rounds them.

    Args:
      x: floating [batch, tokens, heads, head_size].
      rotation: rotation of the tokens' positions.
    """
    first, second = jnp.split(upcast(x), 2, axis=-1)
    cos, sin = (angles[:, None].astype(first.dtype) for angles in rotation)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
