"""Task `digits`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, with a small CNN.

The data comes with scikit-learn, so this job runs anywhere; BatchNorm and dropout give it the model
state and the random key that larger jobs have.
"""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.extras import extra_packages
from jmp_train.policies.batch_norms import batch_norm_paths
from jmp_train.tasks.image_loss import image_loss
from jmp_train.tasks.task import Arrays, Task, TaskOptions

CLASSES = 10


class DigitsCNN(nn.Module):
    """Three convolutions with BatchNorm, mean pooling, dropout and a dense layer.

    It names no dtype: inputs and parameters bring theirs, and so a policy decides.
    """

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 8, 8, 1]."""
        for features, strides in ((32, 1), (64, 2), (64, 1)):
            x = nn.Conv(features, (3, 3), strides, use_bias=False)(x)
            norm = nn.BatchNorm(
                use_running_average=not train, momentum=0.9, axis_name=self.axis_name
            )
            x = nn.relu(norm(x))
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


_MODEL = DigitsCNN()
_IMAGES = (1, 8, 8, 1)


def init(key: jax.Array) -> tuple[Any, Any]:
    """Returns float32 parameters and batch statistics."""
    variables = _MODEL.init(key, jnp.zeros(_IMAGES), train=False)
    return variables["params"], variables["batch_stats"]


def batch_norms() -> tuple[str, ...]:
    """Returns the paths of the model's BatchNorms in the parameters."""
    return batch_norm_paths(_MODEL, jax.ShapeDtypeStruct(_IMAGES, jnp.float32), train=False)


def loss_fn(
    params: Any, batch_stats: Any, batch: Any, rng: Any, axis_name: str | None = None
) -> tuple[jax.Array, Any]:
    """Returns the mean cross-entropy, the next batch statistics and the accuracy.

    Args:
      params: what `init` made.
      batch_stats: what `init` made.
      batch: rows that are prepared.
      rng: of the dropout.
      axis_name: the mesh axis over which BatchNorm is synchronised, where a batch is cut.
    """
    return image_loss(DigitsCNN(axis_name), params, batch_stats, batch, {"dropout": rng})


def predict(params: Any, batch_stats: Any, batch: Any) -> Any:
    """Returns the logits [batch, 10] of `batch["image"]`."""
    variables = {"params": params, "batch_stats": batch_stats}
    return _MODEL.apply(variables, batch["image"], train=False)


def load(options: TaskOptions) -> Task:
    """Returns the task, with a fifth of each digit's images held out for the test."""
    if options.data_dir is not None or options.synthetic:
        raise ValueError("task digits brings its data: it takes no --data-dir and no --synthetic")
    with extra_packages():
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    data = {
        "image": (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32),
        "label": labels.astype(np.int32),
    }
    train_rows, test_rows = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    return Task(
        name="digits",
        train=_rows(data, train_rows),
        test=_rows(data, test_rows),
        prepare=lambda rows: rows,
        init=init,
        loss_fn=partial(loss_fn, axis_name=options.axis_name),
        predict=predict,
        schedule=lambda steps: optax.cosine_decay_schedule(3e-3, steps),
        optimizer=optax.adam,
        batch_size=64,
        epochs=15,
        devices=options.devices,
        batch_norms=batch_norms,
    )


def _rows(data: Arrays, rows: Any) -> Arrays:
    return {name: array[rows] for name, array in data.items()}
