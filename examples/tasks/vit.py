"""ViT-B/16 on ImageNet, ColossalAI's benchmark of its AMP modes: `jmp-train train examples/tasks/vit.py --synthetic`.

timm's vit_base_patch16_224 with dropout 0.1, batch 128, SGD 1e-2 with weight decay 0.1 and no momentum, gradients
clipped at norm 1, 300 epochs. The learning rate is ColossalAI's LinearWarmupLR, with a warm-up of 50 of 300
epochs there, and of the first sixth of the run's steps here.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from models import Accuracy, ImageClassifier, VisionTransformer, image_classifier
from readers.image_folder import center_crops, random_crops, read_image_folder
from task_options import Arrays, FileOptions, with_warm_up

import jmp_train as jt

LEARNING_RATE, WEIGHT_DECAY, LARGEST_NORM = 1e-2, 0.1, 1.0
EPOCHS, WARM_UP_SHARE = 300, 6
BATCH_SIZE = 128
IMAGE_SIZE = 224

# Red, green and blue of ImageNet's training images, from 0 to 1.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

# Synthetic data are for trials, also on CPUs: few examples and one epoch, unless --epochs is given.
SYNTHETIC_CLASSES, SYNTHETIC_EXAMPLES, SYNTHETIC_TEST_EXAMPLES, SYNTHETIC_EPOCHS = 10, 1024, 128, 1


def normalized(images: jax.Array | np.ndarray) -> jax.Array:
    """Returns images normalized by ImageNet's mean and standard deviation, in float32.

    Args:
      images: uint8 [batch, height, width, 3].
    """
    mean, std = (np.array(values, np.float32) * 255 for values in (MEAN, STD))
    return (jnp.asarray(images, jnp.float32) - mean) / std


def classifier(model: VisionTransformer, image_size: int) -> ImageClassifier:
    """Returns the functions of a task for a network without batch statistics.

    Args:
      model: the network.
      image_size: the side of an image in pixels, which determines the number of positions.
    """
    return image_classifier(lambda axis: model, (1, image_size, image_size, 3), normalize=normalized)


def schedule(steps: int) -> optax.Schedule:
    """Returns the learning rate: a warm-up over a sixth of the run, then a linear decrease to 0.

    Args:
      steps: number of steps of the run.

    Reference: colossalai.nn.lr_scheduler.LinearWarmupLR.
    """
    warm_up = steps // WARM_UP_SHARE
    down = optax.linear_schedule(LEARNING_RATE, 0.0, steps - warm_up)
    return with_warm_up(down, LEARNING_RATE, warm_up)


def optimizer(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Returns torch's SGD with L2 weight decay and gradient clipping.

    Args:
      learning_rate: a number or a schedule.
    """
    return optax.chain(
        optax.clip_by_global_norm(LARGEST_NORM),
        optax.add_decayed_weights(WEIGHT_DECAY),
        optax.sgd(learning_rate),
    )


@dataclasses.dataclass(frozen=True)
class Options(FileOptions):
    """Options of the job.

    Args:
      image_size: the side of an image in pixels, a multiple of 16; default: 224.
    """

    image_size: int | None = None


def task(options: Options) -> jt.Task:
    """Returns the task with the image folder `options.data_dir`, or with synthetic data."""
    size = IMAGE_SIZE if options.image_size is None else options.image_size
    patch = VisionTransformer.patch
    if size < 1 or size % patch:
        raise ValueError(f"image_size={size} must be a multiple of the patch size, {patch}")
    model, data = (VisionTransformer(), _synthetic(size)) if options.synthetic else _folder(options, size)
    found = classifier(model, size)
    return jt.Task(
        **data,
        init=found.init,
        loss_fn=found.loss_fn,
        metrics=Accuracy(found.predict),
        learning_rate=schedule,
        optimizer=lambda steps: optimizer(schedule(steps)),
        batch_size=BATCH_SIZE,
    )


def _folder(options: Options, size: int) -> tuple[VisionTransformer, dict[str, Any]]:
    """Returns the network for a folder's classes, and the task's data arguments for the folder."""
    folder = options.folder("the folder of train/CLASS/*.jpg and val/CLASS/*.jpg")
    train, test, classes = read_image_folder(folder)
    # The files are sorted by class; with --train-size N, the first N must include all classes.
    order = np.random.default_rng(0).permutation(len(train["label"]))

    def prepare(examples: Arrays) -> Arrays:
        return {"image": center_crops(examples["path"], size), "label": examples["label"]}

    def augment(examples: Arrays, seeds: np.ndarray) -> Arrays:
        return {"image": random_crops(examples["path"], seeds, size), "label": examples["label"]}

    return VisionTransformer(len(classes)), {
        "train": {name: array[order] for name, array in train.items()},
        "test": test,
        "prepare": prepare,
        "augment": augment,
        "loading_threads": min(16, os.cpu_count() or 1),
        "epochs": EPOCHS,
    }


def _synthetic(size: int) -> dict[str, Any]:
    return {
        "train": synthetic_data(SYNTHETIC_EXAMPLES, size, seed=0),
        "test": synthetic_data(SYNTHETIC_TEST_EXAMPLES, size, seed=1),
        "epochs": SYNTHETIC_EPOCHS,
    }


def synthetic_data(count: int, size: int, seed: int) -> dict[str, np.ndarray]:
    """Returns noise in a color for each of ten labels, learnable in a few steps.

    Args:
      count: number of examples.
      size: the side of an image in pixels.
      seed: seed of the labels and the noise.

    Returns:
      `image`, uint8 [count, size, size, 3], and `label`, int32 [count].
    """
    random = np.random.default_rng(seed)
    colors = np.random.default_rng(0).integers(0, 129, (SYNTHETIC_CLASSES, 3), np.uint8)
    labels = random.integers(0, SYNTHETIC_CLASSES, count, np.int32)
    images = random.integers(0, 128, (count, size, size, 3), np.uint8)
    images += colors[labels][:, None, None]
    return {"image": images, "label": labels}
