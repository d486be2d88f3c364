"""ResNet-34 on CIFAR-10, the job of Colossal-AI's tutorial: `jmp-train train examples/tasks/cifar10.py --synthetic`.

SGD 0.1 with momentum 0.9 and L2 5e-4, cosine, batch 128, 200 epochs. Unlike in the tutorial, the rate
warms up over the first 390 steps, one of its 200 epochs. Images are passed as bytes; the step crops,
flips and normalizes them on the device, so that the host does nothing.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from models import Accuracy, ResNet, image_classifier
from readers.public_images import CIFAR10_CLASSES, CIFAR10_FILES, CIFAR10_SIZE, read_cifar10
from task_options import Arrays, ShardedFileOptions

import jmp_train as jt

LEARNING_RATE = 0.1
WARM_UP = 390  # steps: an epoch of 50,000 images in batches of 128
WEIGHT_DECAY = 5e-4
PADDING = 4  # black pixels around an image before it is cropped
TEST_EXAMPLES = 2_000  # of synthetic data, few enough for several modes on a CPU
MEAN = (0.4914, 0.4822, 0.4465)  # of red, green and blue, as in the tutorial
STD = (0.2023, 0.1994, 0.2010)

_IMAGES = (1, CIFAR10_SIZE, CIFAR10_SIZE, 3)


def augment(images: jax.Array, key: jax.Array) -> jax.Array:
    """Returns images cropped at random from a black frame, and randomly flipped.

    Args:
      images: [batch, rows, columns, 3], any dtype.
      key: random key of the crops and flips.
    """
    count, rows, columns, channels = images.shape
    crop_key, flip_key = jax.random.split(key)
    corners = jax.random.randint(crop_key, (count, 2), 0, 2 * PADDING + 1)
    flips = jax.random.bernoulli(flip_key, 0.5, (count,))
    frame = ((0, 0), (PADDING, PADDING), (PADDING, PADDING), (0, 0))

    def crop_image(image: jax.Array, corner: jax.Array, flip: jax.Array) -> jax.Array:
        crop = lax.dynamic_slice(image, (corner[0], corner[1], 0), (rows, columns, channels))
        return jnp.where(flip, crop[:, ::-1], crop)

    return jax.vmap(crop_image)(jnp.pad(images, frame), corners, flips)


def normalize(images: jax.Array | np.ndarray) -> jax.Array:
    """Returns images with mean 0 and standard deviation 1 over CIFAR-10.

    Args:
      images: uint8 [batch, 32, 32, 3].

    Returns:
      float32, same shape.
    """
    return (jnp.asarray(images, jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)


def prepare(examples: Arrays) -> Arrays:
    """Returns the images unchanged, and the labels as int32."""
    return {"image": examples["image"], "label": examples["label"].astype(np.int32)}


def schedule(steps: int) -> optax.Schedule:
    """Returns the learning rate: a warm-up, then a cosine over the run.

    Args:
      steps: number of steps of the run.
    """
    # At 0.1 from the first step on, the weights move faster than BatchNorm's running statistics. A long run
    # recovers; after a short one, half-precision activations overflow in the evaluation.
    cosine = optax.cosine_decay_schedule(LEARNING_RATE, steps)
    return lambda count: cosine(count) * jnp.minimum((count + 1) / WARM_UP, 1.0)


def sgd(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Returns torch's SGD with momentum 0.9 and L2, which is added to the gradient of all parameters.

    Args:
      learning_rate: a number or a schedule.
    """
    decay = optax.add_decayed_weights(WEIGHT_DECAY)
    return optax.chain(decay, optax.sgd(learning_rate, momentum=0.9))


Options = ShardedFileOptions


def task(options: Options) -> jt.Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic data."""
    if options.synthetic:
        train, test = synthetic_data(50_000, seed=0), synthetic_data(TEST_EXAMPLES, seed=1)
    else:
        train, test = read_cifar10(options.folder("the folder of these files", CIFAR10_FILES))
    return make_task(ResNet(axis_name=options.axis_name), train, test)


def make_task(model: ResNet, train: Arrays, test: Arrays) -> jt.Task:
    """Returns the task of training a ResNet.

    Args:
      model: the network, with its `axis_name`.
      train: `image`, uint8 [examples, 32, 32, 3], and `label`, uint8 [examples].
      test: the same.
    """
    found = image_classifier(lambda axis: model.clone(axis_name=axis), _IMAGES, normalize=normalize, augment=augment)
    return jt.Task(
        train=train,
        test=test,
        prepare=prepare,
        init=found.init,
        loss_fn=partial(found.loss_fn, axis_name=model.axis_name),
        metrics=Accuracy(found.predict),
        learning_rate=schedule,
        optimizer=lambda steps: sgd(schedule(steps)),
        batch_size=128,
        epochs=200,
        batch_norms=found.batch_norms,
    )


def synthetic_data(count: int, seed: int) -> Arrays:
    """Returns noise in a color for each label: CIFAR-10's shapes, with labels that survive crops and flips.

    Args:
      count: number of examples.
      seed: seed of the labels and the noise.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, CIFAR10_CLASSES, count, np.uint8)
    images = random.integers(0, 128, (count, CIFAR10_SIZE, CIFAR10_SIZE, 3), np.uint8)
    colors = 60 * np.stack([labels % 3, labels // 3 % 3, labels // 9], axis=-1)
    images += colors[:, None, None]
    return {"image": images, "label": labels}
