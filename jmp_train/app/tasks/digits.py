"""Task `digits`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, with a small CNN.

The data come with scikit-learn, so this job runs anywhere. BatchNorm and dropout give it the model
state and the random key that larger jobs have.
"""

import dataclasses
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.extras import extra_packages
from jmp_train.policies import autocast, batch_norm_paths
from jmp_train.task import DATA_AXIS, Examples, Task

CLASSES = 10
SHAPE = (1, 8, 8, 1)


class DigitsCNN(nn.Module):
    """Three convolutions with BatchNorm, mean pooling, dropout and a dense layer.

    It sets no dtype: inputs and parameters determine it, so a policy decides.
    """

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 8, 8, 1]."""
        for features, strides in ((32, 1), (64, 2), (64, 1)):
            x = nn.Conv(features, (3, 3), strides, use_bias=False)(x)
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)
            x = nn.relu(norm(x))
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Returns float32 parameters and batch statistics."""
    # Compiled, so that the forward pass is removed instead of compiled and run operation by operation.
    variables = jax.jit(partial(DigitsCNN().init, train=False))(key, jnp.zeros(SHAPE))
    return variables["params"], variables["batch_stats"]


def loss_fn(
    params: Any, batch_stats: Any, batch: Examples, rng: jax.Array | None, axis_name: str | None = None
) -> tuple[jax.Array, Any]:
    """Returns the mean cross-entropy, the next batch statistics and the accuracy."""
    logits, updated = DigitsCNN(axis_name).apply(
        {"params": params, "batch_stats": batch_stats},
        batch["image"],
        train=True,
        mutable=["batch_stats"],
        rngs=None if rng is None else {"dropout": rng},
    )
    logits = logits.astype(jnp.float32)  # the loss should not be in half precision
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    accuracy = (logits.argmax(-1) == batch["label"]).mean(dtype=jnp.float32)
    return loss, (updated["batch_stats"], {"accuracy": accuracy})


def predict(params: Any, batch_stats: Any, batch: Examples) -> Any:
    """Returns the logits of a batch."""
    return DigitsCNN().apply({"params": params, "batch_stats": batch_stats}, batch["image"], train=False)


def metrics(params: Any, batch_stats: Any, batch: Examples) -> dict[str, Any]:
    """Returns the accuracy, for which a non-finite output counts as wrong, and the number of such outputs."""
    return autocast(_judged, enabled=False)(predict(params, batch_stats, batch), jnp.asarray(batch["label"]))


def _judged(logits: jax.Array, label: jax.Array) -> dict[str, Any]:
    is_finite = jnp.isfinite(logits).all(-1)
    is_right = is_finite & (logits.argmax(-1).astype(label.dtype) == label)
    return {"test_accuracy": (is_right.sum(), label.size), "nonfinite_outputs": (~is_finite).sum()}


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of task `digits`.

    Args:
      devices: number of devices over which a batch is sharded.
    """

    devices: int = 1


def task(options: Options) -> Task:
    """Returns the task, with a fifth of each digit's images held out for evaluation."""
    with extra_packages():
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    data = {"image": (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32), "label": labels.astype(np.int32)}
    chosen = train_test_split(np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0)
    train, test = ({name: array[examples] for name, array in data.items()} for examples in chosen)
    rate = partial(optax.cosine_decay_schedule, 3e-3)
    return Task(
        train=train,
        test=test,
        init=init,
        loss_fn=partial(loss_fn, axis_name=DATA_AXIS if options.devices > 1 else None),
        metrics=metrics,
        learning_rate=rate,
        optimizer=lambda steps: optax.adam(rate(steps)),
        batch_size=64,
        epochs=15,
        batch_norms=lambda: batch_norm_paths(DigitsCNN(), jax.ShapeDtypeStruct(SHAPE, jnp.float32), train=False),
    )
