"""Five models in the styles of their libraries, whose products are tuned for few bits; each learns a rule with noise.

A language model in flax nnx, a vision transformer in equinox, an MLP-Mixer in flax linen, a language model in haiku,
and a mixture of experts in plain JAX, whose experts are ragged products.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

WORDS, LENGTH, WIDTH, HEADS, LAYERS = 32, 16, 32, 2, 1
CLASSES, SIDE, PATCH = 8, 8, 2
EXPERTS = 4


class Subject(NamedTuple):
    """A model to tune.

    Attributes:
      params: its first parameters.
      loss_fn: `loss_fn(params, batch)`.
      batch: `batch(seed)`.
    """

    params: Any
    loss_fn: Callable[[Any, Any], jax.Array]
    batch: Callable[[int], Any]


def sentences(seed: int, size: int = 16) -> jax.Array:
    """Each word follows from the two before it, but for a tenth of them."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, WORDS, (size, LENGTH + 1))
    noisy = rng.random(words.shape) < 0.1
    for i in range(2, LENGTH + 1):
        words[:, i] = np.where(noisy[:, i], words[:, i], (3 * words[:, i - 1] + words[:, i - 2]) % WORDS)
    return jnp.asarray(words)


def pictures(seed: int, size: int = 32) -> dict[str, jax.Array]:
    """Each class is a picture with noise."""
    rng = np.random.default_rng(seed)
    classes = np.random.default_rng(0).normal(size=(CLASSES, SIDE, SIDE))
    label = rng.integers(0, CLASSES, size)
    noise = rng.normal(size=(size, SIDE, SIDE))
    return {"image": jnp.asarray(classes[label] + 1.5 * noise, jnp.float32), "label": jnp.asarray(label)}


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


def attended(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of [..., time, heads, features]."""
    scores = jnp.einsum("...qhd,...khd->...hqk", q, k) / q.shape[-1] ** 0.5
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -1e9)
    return jnp.einsum("...hqk,...khd->...qhd", jax.nn.softmax(scores), v)


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.wq, self.wk, self.wv, self.wo = (nnx.Linear(WIDTH, WIDTH, rngs=rngs) for _ in range(4))
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        h, heads = self.norm1(x), (*x.shape[:-1], HEADS, WIDTH // HEADS)
        q = self.wq(h)
        k = self.wk(h)
        v = self.wv(h)
        h = attended(q.reshape(heads), k.reshape(heads), v.reshape(heads)).reshape(x.shape)
        x = x + self.wo(h)
        h = jax.nn.gelu(self.up(self.norm2(x)))
        return x + self.down(h)


class Decoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.places = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm, self.output = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.Linear(WIDTH, WORDS, rngs=rngs)

    def __call__(self, words: jax.Array) -> jax.Array:
        x = self.embed(words) + self.places(jnp.arange(LENGTH))
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))


def nnx_language_model() -> Subject:
    graph, params = nnx.split(Decoder(nnx.Rngs(0)))

    def loss_fn(params: Any, words: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(words[:, :-1]), words[:, 1:])

    return Subject(params, loss_fn, sentences)


class EquinoxBlock(eqx.Module):
    norm1: eqx.nn.LayerNorm
    norm2: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3)
        self.norm1, self.norm2 = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.up = eqx.nn.Linear(WIDTH, 2 * WIDTH, key=keys[1])
        self.down = eqx.nn.Linear(2 * WIDTH, WIDTH, key=keys[2])

    def __call__(self, x: jax.Array) -> jax.Array:
        h = jax.vmap(self.norm1)(x)
        x = x + self.attention(h, h, h)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norm2)(x)))
        return x + jax.vmap(self.down)(h)


class VisionTransformer(eqx.Module):
    patches: eqx.nn.Linear
    places: jax.Array
    blocks: list[EquinoxBlock]
    head: eqx.nn.MLP

    def __init__(self, key: jax.Array) -> None:
        keys = jax.random.split(key, 3 + LAYERS)
        self.patches = eqx.nn.Linear(PATCH**2, WIDTH, key=keys[0])
        self.places = 0.1 * jax.random.normal(keys[1], ((SIDE // PATCH) ** 2, WIDTH))
        self.blocks = [EquinoxBlock(key) for key in keys[3:]]
        self.head = eqx.nn.MLP(WIDTH, CLASSES, 2 * WIDTH, 1, key=keys[2])

    def __call__(self, image: jax.Array) -> jax.Array:
        n = SIDE // PATCH
        pieces = image.reshape(n, PATCH, n, PATCH).transpose(0, 2, 1, 3).reshape(n * n, -1)
        x = jax.vmap(self.patches)(pieces) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def equinox_vision_transformer() -> Subject:
    params, static = eqx.partition(VisionTransformer(jax.random.key(0)), eqx.is_inexact_array)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(jax.vmap(eqx.combine(params, static))(batch["image"]), batch["label"])

    return Subject(params, loss_fn, pictures)


class MixerBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        y = nn.Dense(y.shape[-1], name="token_out")(nn.gelu(nn.Dense(2 * y.shape[-1], name="token_in")(y)))
        x = x + jnp.swapaxes(y, 1, 2)
        y = nn.gelu(nn.Dense(2 * WIDTH, name="channel_in")(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, name="channel_out")(y)


class MlpMixer(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (PATCH, PATCH), (PATCH, PATCH), name="stem")(images[..., None])
        x = x.reshape(len(x), -1, WIDTH)
        for _ in range(LAYERS):
            x = MixerBlock()(x)
        return nn.Dense(CLASSES, name="head")(nn.LayerNorm(name="pre_head_norm")(x).mean(1))


def linen_mixer() -> Subject:
    model = MlpMixer()
    params = model.init(jax.random.key(0), pictures(0)["image"])

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(params, batch["image"]), batch["label"])

    return Subject(params, loss_fn, pictures)


def haiku_language_model() -> Subject:
    def forward(words: jax.Array) -> jax.Array:
        x = hk.Embed(WORDS, WIDTH)(words) + hk.get_parameter("places", [LENGTH, WIDTH], init=jnp.zeros)
        mask = jnp.tril(jnp.ones((1, 1, LENGTH, LENGTH)))
        for _ in range(LAYERS):
            init = hk.initializers.VarianceScaling(2 / LAYERS)
            h = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(HEADS, WIDTH // HEADS, w_init=init, model_size=WIDTH)(h, h, h, mask=mask)
            dense = hk.Sequential([hk.Linear(4 * WIDTH, w_init=init), jax.nn.gelu, hk.Linear(WIDTH, w_init=init)])
            x = x + dense(hk.LayerNorm(-1, True, True)(x))
        return hk.Linear(WORDS, name="output")(hk.LayerNorm(-1, True, True)(x))

    net = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params: Any, words: jax.Array) -> jax.Array:
        return cross_entropy(net.apply(params, words[:, :-1]), words[:, 1:])

    return Subject(net.init(jax.random.PRNGKey(0), sentences(0)[:, :-1]), loss_fn, sentences)


def mixture_of_experts() -> Subject:
    """Each word goes to one expert, by a router; the words of an expert are a group of a ragged product."""
    keys = iter(jax.random.split(jax.random.key(0), 32))

    def weight(*shape: int) -> jax.Array:
        return jax.random.normal(next(keys), shape) / shape[-2] ** 0.5

    def block() -> dict[str, jax.Array]:
        experts = {"up": weight(EXPERTS, WIDTH, 2 * WIDTH), "down": weight(EXPERTS, 2 * WIDTH, WIDTH)}
        others = {"qkv": weight(WIDTH, 3 * WIDTH), "out": weight(WIDTH, WIDTH), "router": weight(WIDTH, EXPERTS)}
        return experts | others

    params = {"embed": weight(WORDS, WIDTH), "places": weight(LENGTH, WIDTH), "head": weight(WIDTH, WORDS)}
    params |= {f"block{i}": block() for i in range(LAYERS)}

    def norm(x: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)

    def mixed(p: Any, x: jax.Array) -> jax.Array:
        with jax.named_scope("router"):
            gates = jax.nn.softmax((x @ p["router"]).astype(jnp.float32))
        chosen = jnp.argmax(gates, axis=-1)
        order = jnp.argsort(chosen)
        sizes = jnp.bincount(chosen, length=EXPERTS).astype(jnp.int32)
        with jax.named_scope("experts"):
            hidden = jax.nn.gelu(jax.lax.ragged_dot(x[order], p["up"], sizes))
            out = jax.lax.ragged_dot(hidden, p["down"], sizes)
        return out[jnp.argsort(order)] * gates.max(axis=-1, keepdims=True)

    def loss_fn(params: Any, words: jax.Array) -> jax.Array:
        x = params["embed"][words[:, :-1]] + params["places"]
        heads = (*x.shape[:-1], HEADS, WIDTH // HEADS)
        for i in range(LAYERS):
            p = params[f"block{i}"]
            with jax.named_scope(f"block{i}"):
                with jax.named_scope("attention"):
                    q, k, v = (a.reshape(heads) for a in jnp.split(norm(x) @ p["qkv"], 3, -1))
                    x = x + attended(q, k, v).reshape(x.shape) @ p["out"]
                x = x + mixed(p, norm(x).reshape(-1, WIDTH)).reshape(x.shape)
        with jax.named_scope("head"):
            return cross_entropy(norm(x) @ params["head"], words[:, 1:])

    return Subject(params, loss_fn, sentences)


MODELS = (nnx_language_model, equinox_vision_transformer, linen_mixer, haiku_language_model, mixture_of_experts)
