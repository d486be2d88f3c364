"""PyTorch's MNIST network for automatic mixed precision: `jmp-train compare examples/tasks/mnist.py --data-dir DIR`.

Fourteen blocks of convolution, BatchNorm and ReLU, mean pooling and three dense layers, with
PyTorch's defaults: biased convolutions, its initializers, BatchNorm's eps 1e-5 and momentum 0.1
(flax's 0.9). One difference comes from flax: the running variance divides by n instead of n - 1, which
makes it at most 0.05% smaller here.
"""

from functools import partial

import flax.linen as nn
import jax
import numpy as np
import optax
from models import Accuracy, Conv, batch_norm, image_classifier, torch_uniform
from readers.public_images import MNIST_FILES, read_mnist
from task_options import Arrays, ShardedFileOptions

import jmp_train as jt

# (channels in, channels out, kernel, stride, padding)
BLOCKS = (
    (1, 32, 3, 1, 1),
    (32, 64, 3, 1, 1),
    (64, 64, 2, 2, 0),
    (64, 128, 3, 1, 1),
    (128, 128, 3, 1, 1),
    (128, 128, 3, 1, 1),
    (128, 128, 2, 2, 0),
    (128, 256, 3, 1, 1),
    (256, 256, 2, 1, 0),
    (256, 512, 3, 1, 1),
    (512, 512, 3, 1, 1),
    (512, 512, 3, 1, 1),
    (512, 512, 2, 2, 0),
    (512, 1024, 3, 1, 1),
)
DENSE = (1000, 1000)
CLASSES = 10
LEARNING_RATE = 1e-4


class MnistCNN(nn.Module):
    """The network. It sets no dtype: inputs and parameters determine it, so a policy decides."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 28, 28, 1]."""
        for channels, features, size, stride, padding in BLOCKS:
            init = torch_uniform(channels * size**2)
            conv = Conv(features, size, stride, padding, kernel_init=init, bias_init=init)
            x = nn.relu(batch_norm(train, self.axis_name)(conv(x)))
        x = x.mean(axis=(1, 2))
        for features in DENSE:
            x = nn.relu(_dense(features, x.shape[-1])(x))
        return _dense(CLASSES, x.shape[-1])(x)


def _dense(features: int, fan_in: int) -> nn.Dense:
    init = torch_uniform(fan_in)
    return nn.Dense(features, kernel_init=init, bias_init=init)


init, loss_fn, predict, batch_norms = image_classifier(MnistCNN, (1, 28, 28, 1))


def prepare(examples: Arrays) -> Arrays:
    """Returns images as float32 [batch, 28, 28, 1] from 0 to 1, and labels as int32."""
    return {
        "image": (examples["image"] / np.float32(255))[..., None],
        "label": examples["label"].astype(np.int32),
    }


Options = ShardedFileOptions


def task(options: Options) -> jt.Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic data."""
    if options.synthetic:
        train, test = synthetic_data(60_000, seed=0), synthetic_data(10_000, seed=1)
    else:
        train, test = read_mnist(options.folder("the folder of these files", f":{MNIST_FILES}"))
    return jt.Task(
        train=train,
        test=test,
        prepare=prepare,
        init=init,
        loss_fn=partial(loss_fn, axis_name=options.axis_name),
        metrics=Accuracy(predict),
        learning_rate=LEARNING_RATE,
        optimizer=optax.adam(optax.constant_schedule(LEARNING_RATE)),
        batch_size=256,
        epochs=10,
        batch_norms=batch_norms,
    )


def synthetic_data(count: int, seed: int) -> Arrays:
    """Returns noise with a bright bar for each label: MNIST's shapes, and learnable in a few steps.

    Args:
      count: number of examples.
      seed: seed of the labels and the noise.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count, np.uint8)
    images = random.integers(0, 128, (count, 28, 28), np.uint8)
    images[np.arange(count), 2 * labels + 4] += 127
    return {"image": images, "label": labels}
