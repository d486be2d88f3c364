"""Models that half precision does not harm: whole training steps in the style of four libraries."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from models import image_classifier
from models.graph_classifiers import node_classifier
from models.graph_models import GAT
from promotion import relaxed

import jmp_train as jt

BATCH, WIDTH, LENGTH, VOCABULARY = 8, 16, 6, 12


class Model(NamedTuple):
    """A model to be trained.

    Attributes:
      loss_fn: as `train_step` takes it.
      params: in float32.
      model_state: what else it carries.
      batch: an example of what it is trained on.
    """

    loss_fn: Callable[..., Any]
    params: Any
    model_state: Any
    batch: Any

    def training(self, policy: Any, scale: jt.LossScale | None) -> tuple[Any, jt.TrainState]:
        """Returns a train step, with Adam under autocast to float16, and its first state."""
        optimizer: Any = relaxed(optax.adam(1e-3)) if policy == "autocast_float16" else optax.sgd(0.1, momentum=0.9)
        if scale is not None:
            optimizer = jt.with_loss_scale(optimizer, scale)
        state = jt.TrainState.create(self.params, optimizer, model_state=self.model_state, rng=jr.key(1))
        return jt.train_step(self.loss_fn, optimizer, policy=policy), state


def normal(*shape: int, seed: int = 0) -> jax.Array:
    return jr.normal(jr.key(seed), shape)


def tokens(rows: int = BATCH) -> jax.Array:
    return jr.randint(jr.key(2), (rows, LENGTH + 1), 0, VOCABULARY)


def labels() -> jax.Array:
    return jnp.arange(BATCH) % 10


def cross_entropy(logits: Any, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()


class NormalizedMLP(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for _ in range(2):
            x = nn.relu(nn.BatchNorm(use_running_average=not train)(nn.Dense(WIDTH)(x)))
            x = nn.Dropout(0.1, deterministic=not train)(x)
        return nn.Dense(10)(x)


def perceptron() -> Model:
    """An MLP with BatchNorm and dropout, in flax linen, as the tasks have it."""
    task = image_classifier(lambda axis: NormalizedMLP(), (1, WIDTH))
    params, state = task.init(jr.key(0))
    return Model(task.loss_fn, params, state, {"image": normal(BATCH, WIDTH), "label": labels()})


class CNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        for features in (8, 16):
            x = nn.Conv(features, (3, 3), use_bias=False)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
            x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(10)(x.mean((1, 2)))


def convolutional() -> Model:
    """A CNN with BatchNorm and pooling, in flax linen."""
    task = image_classifier(lambda axis: CNN(), (1, 8, 8, 1))
    params, state = task.init(jr.key(0))
    return Model(task.loss_fn, params, state, {"image": normal(BATCH, 8, 8, 1), "label": labels()})


class ViT(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Conv(WIDTH, (4, 4), strides=(4, 4))(x).reshape(len(x), -1, WIDTH)
        x = x + self.param("positions", nn.initializers.normal(0.02), x.shape[1:])
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        x = x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def vision_transformer() -> Model:
    model, images = ViT(), normal(BATCH, 8, 8, 1)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(model.apply(params, batch["image"]), batch["label"])

    params = jax.jit(model.init)(jr.key(0), images)
    return Model(jt.stateless(loss_fn), params, None, {"image": images, "label": labels()})


class Decoder(nnx.Module):
    """A causal language model whose attention is written by hand."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.embedding = nnx.Param(normal(VOCABULARY, WIDTH))
        self.positions = nnx.Param(0.02 * normal(LENGTH, WIDTH))
        self.norms = nnx.List([nnx.LayerNorm(WIDTH, rngs=rngs) for _ in range(3)])
        self.attention = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, inputs: jax.Array) -> jax.Array:
        x = self.embedding[...][inputs] + self.positions[...]
        x = x + self.attend(self.norms[0](x))
        x = x + self.down(nnx.gelu(self.up(self.norms[1](x))))
        return self.norms[2](x) @ self.embedding[...].T

    def attend(self, x: jax.Array) -> jax.Array:
        query, key, value = jnp.split(self.attention(x), 3, axis=-1)
        logits = jnp.einsum("bqc,bkc->bqk", query, key) / WIDTH**0.5
        logits = jnp.where(jnp.tril(jnp.ones((LENGTH, LENGTH), bool)), logits, jnp.finfo(logits.dtype).min)
        return jnp.einsum("bqk,bkc->bqc", nnx.softmax(logits), value)


def language_model() -> Model:
    """A transformer with an embedding, a causal mask and LayerNorm, in flax nnx."""
    graph, params = nnx.split(Decoder(nnx.Rngs(0)))

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(batch[:, :-1]), batch[:, 1:])

    return Model(jt.stateless(loss_fn), params, None, tokens())


class NNXClassifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(1, WIDTH, (3, 3), rngs=rngs)
        self.norm = nnx.GroupNorm(WIDTH, num_groups=4, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.silu(self.norm(self.conv(x)))
        return self.head(nnx.avg_pool(x, (8, 8)).reshape(len(x), -1))


def group_norms() -> Model:
    """A CNN with GroupNorm, in flax nnx."""
    graph, params = nnx.split(NNXClassifier(nnx.Rngs(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return cross_entropy(nnx.merge(graph, params)(batch["image"]), batch["label"])

    return Model(jt.stateless(loss_fn), params, None, {"image": normal(BATCH, 8, 8, 1), "label": labels()})


def lstm() -> Model:
    """An LSTM over characters, in haiku."""

    def logits(inputs: jax.Array) -> jax.Array:
        core = hk.LSTM(WIDTH)
        x = hk.Embed(VOCABULARY, WIDTH)(inputs)
        start = jax.tree.map(lambda h: h.astype(x.dtype), core.initial_state(len(inputs)))
        outputs, _ = hk.dynamic_unroll(core, x.swapaxes(0, 1), start)
        return hk.Linear(VOCABULARY)(outputs)

    net: Any = hk.without_apply_rng(hk.transform(logits))

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(net.apply(params, batch[:, :-1]), batch[:, 1:].T)

    return Model(jt.stateless(loss_fn), net.init(jr.key(0), tokens()[:, :-1]), None, tokens())


def haiku_transformer() -> Model:
    """A masked transformer block, in haiku; its norms are given float32, as `hk.mixed_precision` does."""

    def norm(x: jax.Array) -> jax.Array:
        return hk.LayerNorm(-1, True, True)(x.astype(jnp.float32)).astype(x.dtype)

    def logits(inputs: jax.Array, mask: jax.Array) -> jax.Array:
        x = hk.Embed(VOCABULARY, WIDTH)(inputs)
        normed = norm(x)
        x = x + hk.MultiHeadAttention(2, 8, model_size=WIDTH, w_init_scale=1.0)(normed, normed, normed, mask)
        x = x + hk.Linear(WIDTH)(jax.nn.gelu(hk.Linear(2 * WIDTH)(norm(x))))
        return hk.Linear(VOCABULARY)(norm(x))

    net: Any = hk.without_apply_rng(hk.transform(logits))
    mask = np.tril(np.ones((1, 1, LENGTH, LENGTH), bool))

    def loss_fn(params: Any, batch: jax.Array) -> jax.Array:
        return cross_entropy(net.apply(params, batch[:, :-1], mask), batch[:, 1:])

    return Model(jt.stateless(loss_fn), net.init(jr.key(0), tokens()[:, :-1], mask), None, tokens())


def autoencoder() -> Model:
    """A variational autoencoder, in haiku."""

    def forward(x: jax.Array, noise: jax.Array) -> Any:
        mean, log_variance = jnp.split(hk.Linear(8)(jnp.tanh(hk.Linear(WIDTH)(x))), 2, axis=-1)
        z = mean + jnp.exp(0.5 * log_variance) * noise
        return hk.Linear(WIDTH)(jnp.tanh(hk.Linear(WIDTH)(z))), mean, log_variance

    net: Any = hk.without_apply_rng(hk.transform(forward))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        outputs, mean, log_variance = (y.astype(jnp.float32) for y in net.apply(params, *batch))
        divergence = 0.5 * (jnp.exp(log_variance) + mean**2 - 1 - log_variance).sum(-1)
        return (optax.sigmoid_binary_cross_entropy(outputs, batch[0] > 0).sum(-1) + divergence).mean()

    batch = normal(BATCH, WIDTH), normal(BATCH, 4, seed=1)
    return Model(jt.stateless(loss_fn), net.init(jr.key(0), *batch), None, batch)


class GRU(eqx.Module):
    cell: eqx.nn.GRUCell
    head: eqx.nn.Linear

    def __call__(self, xs: jax.Array) -> jax.Array:
        def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
            return self.cell(x, h).astype(h.dtype), None

        h, _ = jax.lax.scan(step, jnp.zeros(self.cell.hidden_size, xs.dtype), xs)
        return self.head(h)


def gru() -> Model:
    """A GRU that classifies sequences, in equinox."""
    model = GRU(eqx.nn.GRUCell(WIDTH, WIDTH, key=jr.key(0)), eqx.nn.Linear(WIDTH, 10, key=jr.key(1)))

    def loss_fn(model: GRU, batch: Any) -> jax.Array:
        return cross_entropy(jax.vmap(model)(batch["x"]), batch["label"])

    return Model(jt.stateless(loss_fn), model, None, {"x": normal(BATCH, LENGTH, WIDTH), "label": labels()})


class UNet(eqx.Module):
    """A network of one level down and up, with the timestep's embedding in float32."""

    into: eqx.nn.Conv2d
    down: eqx.nn.Conv2d
    time: eqx.nn.Linear
    up: eqx.nn.ConvTranspose2d
    out: eqx.nn.Conv2d

    def __init__(self, key: jax.Array) -> None:
        keys = jr.split(key, 5)
        self.into = eqx.nn.Conv2d(1, 8, 3, padding=1, key=keys[0])
        self.down = eqx.nn.Conv2d(8, 16, 2, stride=2, key=keys[1])
        self.time = eqx.nn.Linear(8, 16, key=keys[2])
        self.up = eqx.nn.ConvTranspose2d(16, 8, 2, stride=2, key=keys[3])
        self.out = eqx.nn.Conv2d(16, 1, 3, padding=1, key=keys[4])

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        angles = time.astype(jnp.float32) * 10000 ** (-jnp.arange(4) / 4.0)
        embedding = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)]).astype(x.dtype)
        high = jax.nn.silu(self.into(x))
        low = jax.nn.silu(self.down(high) + self.time(embedding)[:, None, None])
        return self.out(jnp.concatenate([high, jax.nn.silu(self.up(low))]))


def diffusion() -> Model:
    """A step of a diffusion model, in equinox."""
    times = jnp.array([1, 5, 100, 333, 500, 700, 990, 999])
    kept = (np.cos(np.asarray(times) / 1000 * np.pi / 2) ** 2).astype(np.float32)

    def loss_fn(model: UNet, batch: Any) -> jax.Array:
        noisy, noise = batch
        return jnp.mean((jax.vmap(model)(noisy, times) - noise).astype(jnp.float32) ** 2)

    images, noise = normal(BATCH, 1, 8, 8), normal(BATCH, 1, 8, 8, seed=1)
    noisy = jnp.sqrt(kept)[:, None, None, None] * images + jnp.sqrt(1 - kept)[:, None, None, None] * noise
    return Model(jt.stateless(loss_fn), UNet(jr.key(0)), None, (noisy, noise))


class Adversaries(NamedTuple):
    """A generator and a discriminator in equinox, each with its optimizer."""

    generator: eqx.nn.MLP
    discriminator: eqx.nn.MLP
    batch: tuple[jax.Array, jax.Array]

    def training(self, policy: Any, scale: jt.LossScale | None) -> tuple[Any, Any]:
        """Returns a step that trains both, and its first state."""
        scale = scale or jt.NoOpLossScale()
        optimizer: Any = jt.with_loss_scale(relaxed(optax.adam(1e-3, b1=0.5)), scale)
        policy = jt.get_policy(policy)

        def update(loss_fn: Any, model: Any, opt_state: Any, *args: Any) -> Any:
            value_and_grad = jt.scaled_value_and_grad(loss_fn, policy)
            loss, grads = value_and_grad(jt.get_loss_scale(opt_state), model, *args)
            updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model, eqx.is_array))
            return loss, eqx.apply_updates(model, updates), opt_state

        def step(state: Any, batch: Any) -> Any:
            (generator, discriminator), (g_state, d_state) = state
            real, noise = batch
            fake = jax.vmap(generator)(noise)
            d_loss, discriminator, d_state = update(_discriminator_loss, discriminator, d_state, real, fake)
            g_loss, generator, g_state = update(_generator_loss, generator, g_state, discriminator, noise)
            return ((generator, discriminator), (g_state, d_state)), {"loss": g_loss + d_loss}

        models = self.generator, self.discriminator
        return step, (models, tuple(optimizer.init(eqx.filter(model, eqx.is_array)) for model in models))


def _judged(discriminator: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(discriminator)(x).astype(jnp.float32)


def _discriminator_loss(discriminator: Any, real: jax.Array, fake: jax.Array) -> jax.Array:
    return (jax.nn.softplus(-_judged(discriminator, real)) + jax.nn.softplus(_judged(discriminator, fake))).mean()


def _generator_loss(generator: Any, discriminator: Any, noise: jax.Array) -> jax.Array:
    return jax.nn.softplus(-_judged(discriminator, jax.vmap(generator)(noise))).mean()


def gan() -> Adversaries:
    """A GAN with the logistic loss, in equinox."""
    generator = eqx.nn.MLP(4, WIDTH, WIDTH, 1, jax.nn.leaky_relu, key=jr.key(0))
    discriminator = eqx.nn.MLP(WIDTH, 1, WIDTH, 1, jax.nn.leaky_relu, key=jr.key(1))
    return Adversaries(generator, discriminator, (normal(BATCH, WIDTH), normal(BATCH, 4, seed=1)))


def graph_attention() -> Model:
    """A graph attention network with self-loops, of `jt.graphs`."""
    random = np.random.default_rng(0)
    pairs = np.concatenate([random.integers(0, 30, (90, 2)), np.stack([np.arange(30)] * 2, 1)])
    graph = jt.graphs.from_edges(pairs[:, 0], pairs[:, 1], n_node=30)
    init, _, loss_fn = node_classifier(lambda key: GAT(WIDTH, 4, 3, (2, 1), rngs=nnx.Rngs(key)))
    params, state = init(jr.key(0))
    batch = {"graph": graph, "features": normal(30, WIDTH), "node": jnp.arange(20), "label": jnp.arange(20) % 3}
    return Model(loss_fn, params, state, batch)


MODELS = (
    perceptron,
    convolutional,
    vision_transformer,
    language_model,
    group_norms,
    lstm,
    haiku_transformer,
    autoencoder,
    gru,
    diffusion,
    gan,
    graph_attention,
)
