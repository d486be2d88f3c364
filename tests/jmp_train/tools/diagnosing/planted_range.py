"""Planted faults of range: squares, exponentials, norms and logits that overflow, numbers that become zero."""

from typing import Any

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
from flax import linen as nn
from flax import nnx
from jax import lax
from models import image_classifier
from planting import Case, Fault, Way, mean_square, values
from promotion import promoting

import jmp_train as jt

WIDTH, LENGTH = 8, 8
BF16 = "bfloat16"


class RMSNorm(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        inverse = lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-3)  # fault: squares of activations
        return x * inverse * scale


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: Any = None) -> tuple[jax.Array, None]:
        return nn.Dense(WIDTH)(RMSNorm()(x)) * 400, None


class Stack(nn.Module):
    where: str

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        kind: Any = nn.remat(Block) if self.where == "remat" else Block
        if self.where == "scan":
            kind = nn.scan(Block, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
            return RMSNorm()(kind()(x)[0] / 400)
        return kind()(x)[0] / 400


def squares(way: Way, where: str = "plain") -> Case:
    model, x = Stack(where), values(LENGTH, WIDTH, scale=400.0)
    params = model.init(jr.key(0), x)
    return way.gradients(lambda p, x: mean_square(model.apply(p, x))), (params, x)


def squares_in_cond(way: Way) -> Case:
    """A layer that is left out at random, as stochastic depth does."""

    def block(x: jax.Array) -> jax.Array:
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True))  # fault: squares in a branch

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, keep = batch
        return mean_square(lax.cond(keep, block, lambda x: x, x @ params["w"]) - 1)

    return way.gradients(loss_fn), ({"w": values(WIDTH, WIDTH)}, (values(LENGTH, WIDTH, scale=400.0), jnp.array(True)))


def squares_in_shards(way: Way) -> Case:
    """A data-parallel step on eight devices."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        h = x @ params["w"]
        h = h / jnp.sqrt((h * h).mean(-1, keepdims=True))  # fault: squares on devices
        return mean_square(h - 1)

    params = {"w": values(WIDTH, WIDTH)}
    step, (state, x) = way.training(loss_fn, params, values(16, WIDTH, scale=400.0))
    return jt.data_parallel(step, mesh), (state, x)


def squares_in_pipeline(way: Way) -> Case:
    """Two stages on two devices."""
    mesh = jax.make_mesh((2, 2), ("data", "pipe"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def block(params: Any, x: jax.Array, rng: Any) -> jax.Array:
        del rng
        norm = jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1)  # fault: squares in a pipeline
        return 400 * jnp.tanh(x / norm @ params["w"])

    blocks = jt.pipeline(block, mesh, "pipe", micro_batches=2)
    params = {"w": values(2, WIDTH, WIDTH)}
    return way.training(lambda p, x: mean_square(blocks(p, x) / 400), params, values(LENGTH, WIDTH, scale=400.0))


def long_norm(way: Way) -> Case:
    """Weight normalization in haiku, of a long input."""

    def layer(x: jax.Array) -> jax.Array:
        x = x / jnp.linalg.norm(x, axis=-1, keepdims=True)  # fault: norm of a long vector
        return hk.Linear(WIDTH)(x)

    net = hk.without_apply_rng(hk.transform(layer))
    x = values(LENGTH, 1024, scale=10.0)
    return way.gradients(lambda p, x: mean_square(net.apply(p, x))), (net.init(jr.key(0), x), x)


class Attention(eqx.Module):
    query: eqx.nn.Linear
    key: eqx.nn.Linear

    def __call__(self, x: jax.Array) -> jax.Array:
        queries, keys = jax.vmap(self.query)(x), jax.vmap(self.key)(x)
        logits = queries @ keys.T  # fault: logits before they are scaled
        return jax.nn.softmax(logits / 4096) @ x


def unscaled_logits(way: Way) -> Case:
    model = Attention(*(eqx.nn.Linear(WIDTH, WIDTH, key=key) for key in jr.split(jr.key(0))))
    x = values(LENGTH, WIDTH, scale=300.0)
    return way.gradients(lambda model, x: mean_square(model(x) / 300)), (model, x)


class HandSoftmax(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.head = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        logits = self.head(x)
        exponentials = jnp.exp(logits)  # fault: exponentials of logits
        return exponentials / exponentials.sum(-1, keepdims=True)


def hand_softmax(way: Way) -> Case:
    graph, params = nnx.split(HandSoftmax(nnx.Rngs(0)))
    x = values(LENGTH, WIDTH, scale=12.0)
    return way.gradients(lambda params, x: mean_square(nnx.merge(graph, params)(x))), (params, x)


def variational(way: Way) -> Case:
    """The encoder of a VAE, of which a few variances are large."""

    def encode(x: jax.Array) -> Any:
        mean, log_variance = jnp.split(hk.Linear(2 * WIDTH)(x), 2, axis=-1)
        divergence = jnp.exp(log_variance) + mean**2 - 1 - log_variance  # fault: variances of a VAE
        return 0.5 * divergence.astype(jnp.float32).mean()

    net = hk.without_apply_rng(hk.transform(encode))
    x = values(LENGTH, WIDTH, scale=12.0)
    return way.gradients(net.apply), (net.init(jr.key(0), x), x)


def gram_matrix(way: Way) -> Case:
    """A style loss."""

    def loss_fn(params: Any, image: jax.Array) -> jax.Array:
        features = nn.relu(lax.conv_general_dilated(image, params["kernel"], (1, 1), "SAME"))
        flat = features.reshape(WIDTH, -1)
        gram = flat @ flat.T  # fault: Gram matrix
        return mean_square(gram / flat.size)

    params = {"kernel": values(WIDTH, 1, 3, 3, scale=4.0)}
    return way.gradients(loss_fn), (params, values(1, 1, 32, 32, scale=8.0))


def dice_loss(way: Way) -> Case:
    """A segmentation loss, of as many pixels as float16 cannot count."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        image, mask = batch
        p = nn.sigmoid(image * params["w"] + params["b"])
        total = jnp.sum(p + mask)  # fault: sum over pixels
        return 1 - 2 * jnp.sum(p * mask).astype(jnp.float32) / total.astype(jnp.float32)

    image = values(320, 320)
    params = {"w": jnp.float32(2.0), "b": jnp.float32(1.0)}
    return way.gradients(loss_fn), (params, (image, (image > 0).astype(jnp.float32)))


class PooledCNN(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        x = nn.Conv(WIDTH, (3, 3))(x)
        x = nn.avg_pool(nn.relu(x), (4, 4), (4, 4))  # fault: sums of a pooling layer
        x = nn.BatchNorm(use_running_average=not train)(x)
        return nn.Dense(10)(x.mean((1, 2)))


def pooling(way: Way) -> Case:
    """The tasks' image classifier, of images that are not scaled to 1."""
    task = image_classifier(lambda axis: PooledCNN(), (1, 8, 8, 1))
    params, model_state = promoting(task.init)(jr.key(0))
    batch = {"image": values(LENGTH, 8, 8, 1, scale=8000.0), "label": jnp.arange(LENGTH)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        return task.loss_fn(params, model_state, batch, None)[0]

    return way.gradients(loss_fn), (params, batch)


def scaled_before_mean(way: Way) -> Case:
    """A loss times 2^16 before the mean, as it is written by hand."""

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        x, y = batch
        scaled = jnp.mean((x @ params["w"] - y) ** 2 * 2.0**12)  # fault: loss times a constant
        return scaled.astype(jnp.float32)

    batch = values(LENGTH, WIDTH), values(LENGTH, 1, seed=1)
    return way.gradients(loss_fn), ({"w": values(WIDTH, 1)}, batch)


def growing_cell(way: Way) -> Case:
    """A linear recurrence that grows for 64 steps, and whose states are scaled down at the end."""

    class Cell(nn.RNNCellBase):
        @nn.compact
        def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
            carry = 1.25 * carry + nn.Dense(WIDTH)(inputs)  # fault: state of a recurrent cell
            return carry, carry

        def initialize_carry(self, rng: Any, input_shape: tuple[int, ...]) -> jax.Array:
            return jnp.ones((*input_shape[:-1], WIDTH))

        @property
        def num_feature_axes(self) -> int:
            return 1

    model, x = nn.RNN(Cell()), values(2, 64, WIDTH)
    params = model.init(jr.key(0), x)

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        states: Any = model.apply(params, x, initial_carry=jnp.ones((2, WIDTH), x.dtype))
        return mean_square(states[:, -1].astype(jnp.float32) * 2.0**-20)

    return way.gradients(loss_fn), (params, x)


def hidden_markov(way: Way) -> Case:
    """The forward algorithm, with probabilities and not with their logarithms."""

    def likelihood(params: Any, emissions: jax.Array) -> jax.Array:
        transitions = jax.nn.softmax(params["logits"])

        def step(alpha: jax.Array, emission: jax.Array) -> tuple[jax.Array, None]:
            alpha = alpha @ transitions * emission  # fault: product of probabilities
            return alpha, None

        alpha, _ = lax.scan(step, jnp.full(WIDTH, 1 / WIDTH, emissions.dtype), emissions)
        return -jnp.log(jnp.sum(alpha.astype(jnp.float32)) + 1e-35)

    emissions = jax.nn.softmax(values(20, WIDTH))
    return way.run(likelihood), ({"logits": values(WIDTH, WIDTH)}, emissions)


def small_squares(way: Way) -> Case:
    """Directions between points that are close to each other."""

    def directions(x: jax.Array, centers: jax.Array) -> jax.Array:
        apart = x - centers
        squared = jnp.sum(apart * apart, -1, keepdims=True)  # fault: squares of small distances
        return apart / jnp.sqrt(squared)

    return way.run(directions), (values(LENGTH, 3, scale=1e-4), jnp.zeros((LENGTH, 3)))


def spread_gates(way: Way) -> Case:
    """The z-loss of a mixture of experts, whose router is far out."""

    def loss_fn(params: Any, x: jax.Array) -> jax.Array:
        logits = x @ params["router"]
        z = jax.nn.logsumexp(logits, axis=-1) ** 2  # fault: z-loss of a router
        return z.astype(jnp.float32).mean() * 1e-3

    return way.gradients(loss_fn), ({"router": values(WIDTH, WIDTH)}, values(LENGTH, WIDTH, scale=100.0))


RANGE = (
    Fault("squares of activations", "overflow", "linen", squares),
    Fault("squares of activations", "overflow", "linen", lambda way: squares(way, "remat"), where="remat"),
    Fault("squares of activations", "overflow", "linen", lambda way: squares(way, "scan"), where="scan"),
    Fault("squares in a branch", "overflow", "jax", squares_in_cond, where="cond"),
    Fault("squares on devices", "overflow", "jax", squares_in_shards, where="shard_map"),
    Fault("squares in a pipeline", "overflow", "jax", squares_in_pipeline, where="pipeline"),
    Fault("norm of a long vector", "overflow", "haiku", long_norm),
    Fault("logits before they are scaled", "overflow", "equinox", unscaled_logits),
    Fault("exponentials of logits", "overflow", "nnx", hand_softmax),
    Fault("variances of a VAE", "overflow", "haiku", variational),
    Fault("Gram matrix", "overflow", "jax", gram_matrix),
    Fault("sum over pixels", "overflow", "jax", dice_loss),
    Fault("sums of a pooling layer", "overflow", "linen", pooling),
    Fault("loss times a constant", "overflow", "jax", scaled_before_mean),
    Fault("state of a recurrent cell", "overflow", "linen", growing_cell, where="scan"),
    Fault("product of probabilities", "underflow", "jax", hidden_markov, where="scan"),
    Fault("squares of small distances", "underflow", "jax", small_squares),
    Fault("z-loss of a router", "overflow", "jax", spread_gates),
)
