"""A residual network in flax linen, as imagenet's: `pmap`, gradients and metrics averaged by the script itself."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import jax_utils
from flax import linen as nn
from flax.training import common_utils, train_state
from jax import lax
from scripts import (
    Script,
    assert_learns_alike,
    assert_skips,
    growing_scale,
    share_by_autocast,
    share_by_policy,
)

import jmp_train as jt

pytestmark = pytest.mark.quick

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


@functools.cache
def script(half: bool) -> Script:
    tx: Any = optax.sgd(0.05, momentum=0.9, nesterov=True)
    state_class: Any = TrainState
    if half:
        tx = jt.with_loss_scale(tx, growing_scale())
        state_class = HalfTrainState
    state = state_class.create(apply_fn=MODEL.apply, tx=tx, **initialized())

    @functools.partial(jax.pmap, axis_name="batch", devices=DEVICES)
    def train_step(state: Any, batch: Any) -> Any:
        if half:
            policy = jt.get_policy("autocast_float16")
            grad_fn = jt.scaled_value_and_grad(loss_fn, policy, has_aux=True)
            grad_fn = functools.partial(grad_fn, state.loss_scale)
        else:
            grad_fn = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, (batch_stats, _)), grads = grad_fn(state.params, state.batch_stats, batch)
        grads = lax.pmean(grads, axis_name="batch")
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, lax.pmean(loss, axis_name="batch")

    batch = jax.tree.map(lambda x: x.reshape(len(DEVICES), -1, *x.shape[1:]), images())
    return Script(jax_utils.replicate(state, DEVICES), train_step, batch)


def test_products_in_half() -> None:
    variables = initialized()
    args = variables["params"], variables["batch_stats"], images()
    assert share_by_policy(loss_fn, *args) == 0
    assert share_by_autocast(loss_fn, *args) == 1


@pytest.mark.full
def test_it_learns_as_in_float32() -> None:
    assert_learns_alike(script(True), script(False), tolerance=1e-2)


def test_an_overflow_on_one_device_is_skipped_by_all_with_their_batch_statistics() -> None:
    half = script(True)
    state, _ = half.step(half.state, half.batch)  # each device has statistics of its own by now
    stats = jax.tree.leaves(state.batch_stats)
    assert any(np.any(x[0] != x[1]) for x in stats)
    image = half.batch["image"]
    huge = {**half.batch, "image": image.at[1, 0].set(1e30)}
    assert_skips(half, state, huge, goes_on=r"^\.step$")
    assert all(np.all(np.isfinite(x)) for x in stats)
