"""Task `digits`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, with a small CNN.

The data comes with scikit-learn, so this job runs anywhere; BatchNorm and dropout give it the model
state and the random key that larger jobs have.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial

import flax.linen as nn
import jax
import numpy as np
import optax

from jmp_train.extras import extra_packages
from jmp_train.task import Arrays, Task
from jmp_train.tasks.models import Accuracy, image_classifier
from jmp_train.tasks.options import axis_name

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
            norm = nn.BatchNorm(use_running_average=not train, momentum=0.9, axis_name=self.axis_name)
            x = nn.relu(norm(x))
        x = x.mean(axis=(1, 2))
        x = nn.Dropout(0.25, deterministic=not train)(x)
        return nn.Dense(CLASSES)(x)


init, loss_fn, predict, batch_norms = image_classifier(DigitsCNN, (1, 8, 8, 1))


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of task `digits`.

    Args:
      devices: over how many devices a batch is sharded.
    """

    devices: int = 1


def task(options: Options) -> Task:
    """Returns the task, with a fifth of each digit's images held out for evaluation."""
    with extra_packages():
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    data = {
        "image": (images.reshape(-1, 8, 8, 1) / 16).astype(np.float32),
        "label": labels.astype(np.int32),
    }
    train_examples, test_examples = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    return Task(
        train=_examples(data, train_examples),
        test=_examples(data, test_examples),
        init=init,
        loss_fn=partial(loss_fn, axis_name=axis_name(options.devices)),
        metrics=Accuracy(predict),
        learning_rate=schedule,
        optimizer=lambda steps: optax.adam(schedule(steps)),
        batch_size=64,
        epochs=15,
        batch_norms=batch_norms,
    )


def schedule(steps: int) -> optax.Schedule:
    """Returns the learning rate: a cosine over the run.

    Args:
      steps: of the run.
    """
    return optax.cosine_decay_schedule(3e-3, steps)


def _examples(data: Arrays, indices: Sequence[int] | np.ndarray) -> Arrays:
    return {name: array[indices] for name, array in data.items()}
