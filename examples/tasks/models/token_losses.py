"""The cross-entropy of tokens over a large vocabulary, without an array of all logits.

The logits of 8,192 tokens over 50,257 words are 1.65 GB in float32. Here they are computed chunk by chunk, and once
more for the gradient; between the two, only each token's logsumexp is stored. A chunk's logits are float32, as are the
sums of the product, even for half-precision operands.

Reference: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models", https://arxiv.org/abs/2411.09009.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.policies import opaque_to_autocast

from .rounded_once import (
    LARGEST_CHUNK,
    as_operand,
    chunk_length,
    joined,
    product,
    split,
    upcast,
    vary_alike,
    zeros_like_sums,
)


class TokenLosses(NamedTuple):
    """The result of `token_losses`.

    Attributes:
      losses: cross-entropy in nats, float32 [batch, tokens].
      right: whether the label has the highest logit, bool [batch, tokens].
    """

    losses: jax.Array
    right: jax.Array


class _Operands(NamedTuple):
    """Features [batch, tokens, width], embedding [vocabulary, width] and labels [batch, tokens]."""

    features: jax.Array
    embedding: jax.Array
    labels: jax.Array


def token_losses(
    features: jax.Array, embedding: jax.Array, labels: jax.Array, largest_chunk: int = LARGEST_CHUNK
) -> TokenLosses:
    """Returns the cross-entropy of the logits `features @ embedding.T`, and whether the label's logit is the highest.

    Args:
      features: floating [batch, tokens, width]; rounded to the embedding's dtype.
      embedding: floating [vocabulary, width].
      labels: integers [batch, tokens].
      largest_chunk: largest number of logits in memory; the number of tokens per chunk is halved until it fits.

    Example:
      >>> found = token_losses(jnp.ones((1, 2, 3)), jnp.eye(4, 3), jnp.array([[0, 3]]))
      >>> [f"{loss:.3f}" for loss in found.losses[0]], found.right.tolist()
      (['1.214', '2.214'], [[True, False]])
    """

    def run(features: jax.Array, embedding: jax.Array, labels: jax.Array) -> TokenLosses:
        length = chunk_length(labels.shape[1], len(labels) * len(embedding), largest_chunk)
        return _losses(length, *vary_alike(_Operands(upcast(features), embedding, labels)))

    return opaque_to_autocast(run)(features, as_operand(embedding), labels)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(length: int, features: jax.Array, embedding: jax.Array, labels: jax.Array) -> TokenLosses:
    return _forward(length, features, embedding, labels)[0]


def _forward(
    length: int, features: jax.Array, embedding: jax.Array, labels: jax.Array
) -> tuple[TokenLosses, tuple[_Operands, jax.Array]]:
    features = features.astype(embedding.dtype)

    def chunk(features: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = _logits(features, embedding)
        words = _words(logits, labels)
        own = jnp.where(words == labels[..., None], logits, 0).sum(-1, keepdims=True)
        # As in argmax, the first of several maxima counts, but without an array of indices.
        lower = jnp.where(words < labels[..., None], logits < own, logits <= own)
        logsumexp = jax.nn.logsumexp(logits, axis=-1)
        return logsumexp - own[..., 0], lower.all(-1), logsumexp

    chunks = split(features, length), split(labels, length)
    losses, right, logsumexp = map(joined, jax.lax.map(lambda x: chunk(*x), chunks))
    return TokenLosses(losses, right), (_Operands(features, embedding, labels), logsumexp)


def _backward(
    length: int, saved: tuple[_Operands, jax.Array], cotangents: TokenLosses
) -> tuple[jax.Array, jax.Array, None]:
    (features, embedding, labels), logsumexp = saved

    def chunk(total: jax.Array, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        features, labels, logsumexp, cotangent = x
        logits = _logits(features, embedding)
        is_label = _words(logits, labels) == labels[..., None]
        off = jnp.exp(logits - logsumexp[..., None]) - is_label.astype(logits.dtype)
        grads = (off * cotangent[..., None]).astype(features.dtype)
        total += product("btv,btw->vw", grads, features)
        return total, product("btv,vw->btw", grads, embedding)

    arrays = features, labels, logsumexp, cotangents.losses
    total, of_features = jax.lax.scan(chunk, zeros_like_sums(embedding), tuple(split(x, length) for x in arrays))
    return joined(of_features), total.astype(embedding.dtype), None


_losses.defvjp(_forward, _backward)


def _logits(features: jax.Array, embedding: jax.Array) -> jax.Array:
    return product("btw,vw->btv", features, embedding)


def _words(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the word of each logit, to compare with labels; the vocabulary may be sharded."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, 2)
