"""A residual network in flax linen, as imagenet's: `pmap`, gradients and metrics averaged by the script itself."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import jax_utils
from flax import linen as nn
from flax.training import common_utils, train_state
from jax import lax
from scripts import Script, gradients_of, half_optimizer

import jmp_train as jt

DEVICES = jax.local_devices()[:2]
CLASSES = 4


class Block(nn.Module):
    filters: int
    conv: Callable[..., Any]
    norm: Callable[..., Any]
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        residual = x
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.conv(self.filters, (3, 3))(y)
        y = self.norm(scale_init=nn.initializers.zeros_init())(y)
        if residual.shape != y.shape:
            residual = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(residual)
            residual = self.norm(name="norm_proj")(residual)
        return nn.relu(residual + y)


class ResNet(nn.Module):
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x: jax.Array, train: bool = True) -> jax.Array:
        conv = functools.partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = functools.partial(
            nn.BatchNorm,
            use_running_average=not train,
            momentum=0.9,
            epsilon=1e-5,
            dtype=self.dtype,
        )
        x = nn.relu(norm(name="bn_init")(conv(8, (3, 3), name="conv_init")(x)))
        x = nn.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for i, filters in enumerate((8, 16)):
            x = Block(filters, conv, norm, strides=(1 + i, 1 + i))(x)
        x = nn.Dense(CLASSES, dtype=self.dtype)(jnp.mean(x, axis=(1, 2)))
        return jnp.asarray(x, self.dtype)


MODEL = ResNet()


def loss_fn(params: Any, batch_stats: Any, batch: Any) -> Any:
    variables = {"params": params, "batch_stats": batch_stats}
    logits, updated = MODEL.apply(variables, batch["image"], mutable=["batch_stats"])
    one_hot = common_utils.onehot(batch["label"], num_classes=CLASSES)
    loss = jnp.mean(optax.softmax_cross_entropy(logits=logits, labels=one_hot))
    l2 = sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)
    return loss + 0.5e-4 * l2, (updated["batch_stats"], logits)


class TrainState(train_state.TrainState):
    batch_stats: Any


class HalfTrainState(jt.FlaxTrainState):
    batch_stats: Any


def images() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    labels = np.arange(16) % CLASSES
    return {
        "image": jnp.asarray(random.normal(labels[:, None, None, None], 1, (16, 8, 8, 3)), "f4"),
        "label": jnp.asarray(labels, jnp.int32),
    }


def initialized() -> Any:
    return jax.jit(MODEL.init)({"params": jax.random.key(0)}, jnp.ones((1, 8, 8, 3)))


def loss_args() -> tuple[Any, ...]:
    variables = initialized()
    return variables["params"], variables["batch_stats"], images()


@functools.cache
def script(half: bool) -> Script:
    tx = half_optimizer(optax.sgd(0.05, momentum=0.9, nesterov=True), half)
    state_class: Any = HalfTrainState if half else TrainState
    state = state_class.create(apply_fn=MODEL.apply, tx=tx, **initialized())

    @functools.partial(jax.pmap, axis_name="batch", devices=DEVICES)
    def train_step(state: Any, batch: Any) -> Any:
        grad_fn = gradients_of(loss_fn, half, has_aux=True)
        (loss, (batch_stats, _)), grads = grad_fn(state.opt_state, state.params, state.batch_stats, batch)
        grads = lax.pmean(grads, axis_name="batch")
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, lax.pmean(loss, axis_name="batch")

    batch = jax.tree.map(lambda x: x.reshape(len(DEVICES), -1, *x.shape[1:]), images())
    return Script(jax_utils.replicate(state, DEVICES), train_step, batch)
