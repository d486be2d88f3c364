"""Task `digits`: scikit-learn's 1,797 handwritten digits of 8 x 8 pixels, with a small CNN.

The data come with scikit-learn, so this job runs anywhere. BatchNorm and dropout give it the model
state and the random key that larger jobs have.
"""

from functools import partial

import flax.linen as nn
import jax
import numpy as np
import optax

from jmp_train.extras import extra_packages
from jmp_train.task import Task
from jmp_train.tasks.models import Accuracy, image_classifier
from jmp_train.tasks.task_options import ShardedOptions

CLASSES = 10


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


init, loss_fn, predict, batch_norms = image_classifier(DigitsCNN, (1, 8, 8, 1))


Options = ShardedOptions


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
        loss_fn=partial(loss_fn, axis_name=options.axis_name),
        metrics=Accuracy(predict),
        learning_rate=rate,
        optimizer=lambda steps: optax.adam(rate(steps)),
        batch_size=64,
        epochs=15,
        batch_norms=batch_norms,
    )
