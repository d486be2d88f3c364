"""Ten planted faults of a language model in linen: the decoder of nanodo, with lines as its users write them.

The model has the structure of google-deepmind/nanodo (nanodo/model.py): learned positions, blocks with LayerNorm before
attention and perceptron, a tied output.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from flax import linen as nn
from jax import lax
from planting import Case, Fault, Way, values
from promotion import promoting

WIDTH, HIDDEN, WORDS = 16, 32, 32
BF16 = "bfloat16"
Attend = Callable[[nn.Module, Any, Any, Any], tuple[Any, Any]]


def weights_of(logits: Any) -> Any:
    """Returns the weights of causal attention, of logits [batch, heads, queries, keys]."""
    past = jnp.tril(jnp.ones(logits.shape[-2:], bool))
    masked = jnp.where(past, logits.astype(jnp.float32), jnp.finfo(jnp.float32).min)
    return jax.nn.softmax(masked, axis=-1)


def mixed(weights: Any, v: Any) -> Any:
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(v.dtype), v)


def softmax_attention(_: nn.Module, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
    logits = jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k)
    return mixed(weights_of(logits), v), 0.0


class Block(nn.Module):
    heads: int
    attend: Attend
    act: Callable[[Any], Any]

    @nn.compact
    def __call__(self, x: Any) -> Any:
        h = nn.LayerNorm(use_bias=False)(x)
        q, k, v = (
            nn.DenseGeneral((self.heads, WIDTH // self.heads), use_bias=False, name=name)(h)
            for name in ("query", "key", "value")
        )
        out, penalty = self.attend(self, q, k, v)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="out")(out)
        h = self.act(nn.Dense(HIDDEN, use_bias=False, name="up")(nn.LayerNorm(use_bias=False)(x)))
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(h), penalty


class Decoder(nn.Module):
    length: int
    heads: int = 2
    attend: Attend = softmax_attention
    act: Callable[[Any], Any] = jax.nn.gelu
    positions: Callable[[Any, Any], Any] = lambda tokens, _: jnp.arange(tokens.shape[1])

    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(WORDS, WIDTH)
        x = embed(tokens)
        x = x + nn.Embed(self.length, WIDTH)(self.positions(tokens, x.dtype))
        x, penalty = Block(self.heads, self.attend, self.act, name="block")(x)
        return embed.attend(nn.LayerNorm(use_bias=False)(x)), penalty


def texts(rows: int, length: int, seed: int = 2) -> jax.Array:
    """Returns the numbers of words, which begin at 1: 0 fills up."""
    return jr.randint(jr.key(seed), (rows, length + 1), 1, WORDS)


def cross_entropy(logits: Any, tokens: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens[:, 1:]).mean()


def language_model(
    way: Way, rows: int = 2, length: int = 16, change: Callable[[Any], Any] = lambda params: params, **parts: Any
) -> Case:
    """Returns the loss and the gradients of the model, its parameters and a batch."""
    model, tokens = Decoder(length, **parts), texts(rows, length)

    def loss_fn(params: Any, tokens: Any) -> Any:
        logits, penalty = model.apply(params, tokens[:, :-1])
        return cross_entropy(logits, tokens) + penalty

    return way.gradients(promoting(loss_fn)), (change(model.init(jr.key(0), tokens[:, :-1])), tokens)


def trained(way: Way) -> Case:
    """The cross entropy of a trained model, which is sure of the next word, in the dtype of its logits."""
    model, tokens = Decoder(16), texts(2, 16)[:, :-1]
    params: Any = model.init(jr.key(0), tokens)
    embedding = params["params"]["Embed_0"]
    embedding["embedding"] = 8 * embedding["embedding"]
    labels = jnp.argmax(model.apply(params, tokens)[0], -1)

    def loss_fn(params: Any, batch: Any) -> Any:
        tokens, labels = batch
        logits = model.apply(params, tokens)[0]
        chosen = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        each = jax.nn.logsumexp(logits, axis=-1) - chosen  # fault: cross entropy of large logits
        return each.astype(jnp.float32).mean()

    return way.gradients(promoting(loss_fn)), (params, (tokens, labels))


def cosines(way: Way) -> Case:
    """Attention by cosines over a temperature, as Swin v2 and ViT-22B have it."""

    def attend(_: nn.Module, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
        logits = 100 * jnp.einsum("bqhd,bkhd->bhqk", q, k)  # fault: cosines over a temperature
        return mixed(weights_of(logits), v), 0.0

    def change(params: Any) -> Any:
        block = params["params"]["block"]  # trained, attention says more than the word itself
        block["out"]["kernel"] = 8 * block["out"]["kernel"]
        return params

    return language_model(way, 4, 32, change, attend=attend)


def packed(way: Way) -> Case:
    """Positions that a mask is added up to, as of examples that are filled up."""

    def positions(tokens: Any, dtype: Any) -> Any:
        mask = (tokens != 0).astype(dtype)
        position = jnp.cumsum(mask, axis=-1) - 1  # fault: positions of a mask
        return position.astype(jnp.int32)

    return language_model(way, 1, 320, positions=positions)


def entropy(way: Way) -> Case:
    """A penalty on the entropy of attention."""

    def attend(_: nn.Module, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        weights = weights_of(jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k)).astype(v.dtype)
        entropy = -(weights * jnp.log(weights + 1e-9)).sum(-1)  # fault: entropy of attention
        return mixed(weights, v), 0.01 * entropy.mean()

    return language_model(way, attend=attend)


def squared_relu(way: Way) -> Case:
    """Primer's activation in a trained model, where a few activations are large."""

    def act(h: Any) -> Any:
        return jnp.square(nn.relu(h))  # fault: squares of a perceptron

    def change(params: Any) -> Any:
        kernel = params["params"]["block"]["up"]["kernel"].at[:, 0].multiply(300)
        params["params"]["block"]["up"]["kernel"] = kernel
        return params

    return language_model(way, act=act, change=change)


def retention(way: Way) -> Case:
    """RetNet's decay, of queries and keys apart."""

    def attend(_: nn.Module, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        n, gamma = jnp.arange(q.shape[1]).astype(q.dtype)[:, None, None], 1 - 2**-5
        q, k = q * gamma**n, k * gamma**-n  # fault: decay of queries and keys
        logits = jnp.tril(jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k))
        return mixed(logits, v), 0.0

    return language_model(way, 1, 384, attend=attend)


def buckets(way: Way) -> Case:
    """T5's biases by buckets of the logarithm of the distance."""

    def attend(module: nn.Module, q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        length, few, exact = q.shape[1], 32, 16
        table = module.param("biases", nn.initializers.normal(1.0), (few, q.shape[2]))
        distance = jnp.maximum(jnp.arange(length)[:, None] - jnp.arange(length), 1).astype(q.dtype)
        far = exact + jnp.log(distance / exact) / math.log(128 / exact) * (few - exact)  # fault: buckets of distances
        bucket = jnp.where(distance < exact, distance, jnp.minimum(far, few - 1)).astype(jnp.int32)
        logits = jnp.einsum("bqhd,bkhd->bhqk", q / q.shape[-1] ** 0.5, k)
        return mixed(weights_of(logits + jnp.moveaxis(table[bucket], -1, 0)), v), 0.0

    return language_model(way, 1, 128, attend=attend)


def word_log_probs(model: Any, params: Any, tokens: Any) -> Any:
    """Returns the logarithms of the probabilities of words [rows, length]."""
    each = jax.nn.log_softmax(model.apply(params, tokens[:, :-1])[0])
    return jnp.take_along_axis(each, tokens[:, 1:, None], -1)[..., 0]


def log_probs(model: Any, params: Any, tokens: Any) -> Any:
    """Returns the logarithms of the probabilities of texts [rows]."""
    return word_log_probs(model, params, tokens).sum(-1)


def preferences(way: Way) -> Case:
    """Direct preference optimization against a reference that is the model before."""
    model, good, bad = Decoder(64), texts(4, 64), texts(4, 64, seed=3)
    params: Any = model.init(jr.key(0), good[:, :-1])
    before = jax.tree.map(lambda x: x + 0.05 * values(*x.shape, scale=float(x.std()), seed=5), params)
    reference = tuple(log_probs(model, before, tokens) for tokens in (good, bad))

    def loss_fn(params: Any, batch: Any) -> Any:
        good, bad, reference = batch
        chosen, rejected = (log_probs(model, params, tokens) for tokens in (good, bad))
        margin = (chosen - rejected) - (reference[0] - reference[1])  # fault: margin over a reference
        return -jax.nn.log_sigmoid(0.5 * margin.astype(jnp.float32)).mean()

    return way.gradients(promoting(loss_fn)), (params, (good, bad, reference))


def penalty(way: Way) -> Case:
    """Group-relative policy optimization, whose penalty is `exp(d) - 1 - d` of small differences, as TRL has it."""
    model, tokens = Decoder(16), texts(4, 16)
    params: Any = model.init(jr.key(0), tokens[:, :-1])
    before = jax.tree.map(lambda x: x + 0.02 * values(*x.shape, scale=float(x.std()), seed=5), params)
    reference = word_log_probs(model, before, tokens)

    def loss_fn(params: Any, batch: Any) -> Any:
        tokens, reference, advantages = batch
        each = word_log_probs(model, params, tokens)
        ratio = jnp.exp(each - lax.stop_gradient(each))
        d = reference - each
        divergence = jnp.exp(d) - d - 1  # fault: divergence from a reference
        return -(ratio * advantages[:, None] - 0.04 * divergence).astype(jnp.float32).mean()

    return way.gradients(promoting(loss_fn)), (params, (tokens, reference, jnp.array([1.0, -1.0, 0.5, -0.5])))


def marginal(way: Way) -> Case:
    """The likelihood of an answer given each of some documents, added up as RAG does."""
    model, tokens = Decoder(16), texts(4, 16)

    def loss_fn(params: Any, tokens: Any) -> Any:
        likelihood = jnp.exp(log_probs(model, params, tokens))  # fault: likelihood of a text
        return -jnp.log(likelihood.mean())

    return way.gradients(promoting(loss_fn)), (model.init(jr.key(0), tokens[:, :-1]), tokens)


GPT = (
    Fault("cross entropy of large logits", "cancellation", "linen", trained, BF16, tolerance=0.04),
    Fault("cosines over a temperature", "cancellation", "linen", cosines, BF16, autocast=True),
    Fault("positions of a mask", "integer precision lost", "linen", packed, BF16),
    Fault("entropy of attention", "underflow", "linen", entropy, action="epsilon"),
    Fault("squares of a perceptron", "overflow", "linen", squared_relu),
    Fault("decay of queries and keys", "overflow", "linen", retention),
    Fault("divergence from a reference", "cancellation", "linen", penalty, BF16, tolerance=0.04, named="nearly"),
    Fault("buckets of distances", "integer precision lost", "linen", buckets, BF16),
    Fault("margin over a reference", "cancellation", "linen", preferences, BF16),
    Fault("likelihood of a text", "underflow", "linen", marginal),
)
