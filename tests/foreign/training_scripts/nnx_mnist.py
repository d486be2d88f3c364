"""A convolutional network in flax nnx, as its MNIST tutorial's: batch norms, dropout, `nnx.Optimizer`, metrics."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from scripts import Script, half_optimizer

import jmp_train as jt


class CNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.dropout1 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.conv2 = nnx.Conv(8, 8, kernel_size=(3, 3), rngs=rngs)
        self.batch_norm2 = nnx.BatchNorm(8, rngs=rngs)
        self.avg_pool = functools.partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(32, 16, rngs=rngs)
        self.dropout2 = nnx.Dropout(rate=0.025, rngs=rngs)
        self.linear2 = nnx.Linear(16, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = self.avg_pool(nnx.relu(self.batch_norm1(self.dropout1(self.conv1(x)))))
        x = self.avg_pool(nnx.relu(self.batch_norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.dropout2(self.linear1(x)))
        return self.linear2(x)


def loss_fn(model: CNN, batch: Any) -> Any:
    logits = model(batch["image"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(), logits


@nnx.jit
def train_step(model: CNN, optimizer: Any, metrics: Any, batch: Any) -> None:
    (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


@nnx.jit
def half_train_step(model: CNN, optimizer: Any, metrics: Any, batch: Any) -> None:
    grad_fn = jt.nnx_value_and_grad(loss_fn, "autocast_float16", has_aux=True)
    (loss, logits), grads = grad_fn(jt.get_loss_scale(optimizer), model, batch)
    metrics.update(loss=loss, logits=logits, labels=batch["label"])
    optimizer.update(model, grads)


def digits() -> dict[str, jax.Array]:
    random = np.random.default_rng(0)
    labels = np.arange(16) % 4
    shades = random.normal(labels[:, None, None, None], 1, (16, 8, 8, 1))
    return {"image": jnp.asarray(shades, jnp.float32), "label": jnp.asarray(labels, jnp.int32)}


def loss_args() -> tuple[Any, ...]:
    return CNN(rngs=nnx.Rngs(0)), digits()


@functools.cache
def script(half: bool) -> Script:
    model = CNN(rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, half_optimizer(optax.adamw(5e-3, 0.9), half), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))
    step: Callable[..., Any] = half_train_step if half else train_step

    def contents() -> Any:
        held = nnx.state((model, metrics)), optimizer.step, optimizer.opt_state
        return jax.tree.map(lambda x: jnp.array(x[...]), held, is_leaf=is_variable)

    def run(state: Any, batch: Any) -> Any:
        held = nnx.state((model, metrics)), optimizer.step, optimizer.opt_state
        jax.tree.map(lambda x, value: x.set_value(value), held, state, is_leaf=is_variable)
        metrics.reset()
        step(model, optimizer, metrics, batch)
        return contents(), metrics.compute()["loss"]

    return Script(contents(), run, digits())


def is_variable(x: Any) -> bool:
    return isinstance(x, nnx.Variable)
