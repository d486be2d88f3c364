"""A haiku CNN with batch statistics and dropout, which learns scikit-learn's digits.

jmp-train compare examples/tasks/haiku_digits.py:task --policies float32 autocast_float16
"""

from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import jmp_train as jt


def net_fn(images: jax.Array, is_training: bool) -> jax.Array:
    """Returns logits [batch, 10]."""
    x = hk.Conv2D(16, 3)(images)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, is_training)
    x = hk.Flatten()(hk.MaxPool(2, 2, "SAME")(jax.nn.relu(x)))
    x = jax.nn.relu(hk.Linear(64)(x))
    if is_training:
        x = hk.dropout(hk.next_rng_key(), 0.2, x)
    return hk.Linear(10)(x)


net = hk.transform_with_state(net_fn)
IMAGES = jnp.zeros((1, 8, 8, 1))


def losses(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the cross-entropy of each image in float32."""
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels)


def loss_fn(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, Any]:
    """Returns the mean loss, the new batch statistics, and no further results."""
    logits, model_state = net.apply(params, model_state, rng, batch["image"], is_training=True)
    return losses(logits, batch["label"]).mean(), (model_state, None)


def metrics(params: Any, model_state: Any, batch: Any) -> dict[str, jax.Array]:
    """Returns the accuracy and the loss of test images."""
    logits, _ = net.apply(params, model_state, None, batch["image"], is_training=False)
    is_right = logits.argmax(-1) == batch["label"]
    return {"accuracy": is_right.mean(dtype=jnp.float32), "loss": losses(logits, batch["label"]).mean()}


def task() -> jt.Task:
    """Returns the training job."""
    x, y = load_digits(return_X_y=True)
    images, labels = x.reshape(-1, 8, 8, 1).astype(np.float32) / 16, y.astype(np.int32)
    x_train, x_test, y_train, y_test = train_test_split(images, labels, test_size=397, random_state=0)
    return jt.Task(
        init=lambda key: net.init(key, IMAGES, is_training=True),
        loss_fn=loss_fn,
        optimizer=optax.adam(2e-3),
        learning_rate=2e-3,
        train={"image": x_train, "label": y_train},
        batch_size=100,
        epochs=10,
        test={"image": x_test, "label": y_test},
        metrics=metrics,
        batch_norms=lambda: jt.policies.batch_norm_paths(net, IMAGES, is_training=True),
    )
