"""Task `mnist`: the network with which PyTorch users learn automatic mixed precision, on MNIST.

Fourteen blocks of convolution, BatchNorm and ReLU, mean pooling and three dense layers, with
PyTorch's defaults: biased convolutions, its initialisers, BatchNorm's eps 1e-5 and momentum 0.1
(flax's 0.9). One thing is flax's own: the running variance divides by n and not by n - 1, which
here is at most 0.05 % less.
"""

from functools import partial
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.idx import read_idx
from jmp_train.policies.batch_norms import batch_norm_paths
from jmp_train.tasks.convolution import Conv, torch_uniform
from jmp_train.tasks.image_loss import image_loss
from jmp_train.tasks.task import Arrays, Task, TaskOptions

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

ADDRESS = "https://storage.googleapis.com/cvdf-datasets/mnist/"
# What is public there: the files' names, their sizes in bytes and their sha256.
FILES = {
    "train-images-idx3-ubyte.gz": (
        9912422,
        "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
    ),
    "train-labels-idx1-ubyte.gz": (
        28881,
        "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
    ),
    "t10k-images-idx3-ubyte.gz": (
        1648877,
        "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
    ),
    "t10k-labels-idx1-ubyte.gz": (
        4542,
        "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
    ),
}


class MnistCNN(nn.Module):
    """The network; it names no dtype: inputs and parameters bring theirs, and so a policy decides."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 28, 28, 1]."""
        for channels, features, size, stride, padding in BLOCKS:
            init = torch_uniform(channels * size**2)
            conv = Conv(features, size, stride, padding, kernel_init=init, bias_init=init)
            norm = nn.BatchNorm(
                use_running_average=not train,
                momentum=0.9,
                epsilon=1e-5,
                axis_name=self.axis_name,
            )
            x = nn.relu(norm(conv(x)))
        x = x.mean(axis=(1, 2))
        for features in DENSE:
            x = nn.relu(_dense(features, x.shape[-1])(x))
        return _dense(CLASSES, x.shape[-1])(x)


def _dense(features: int, fan_in: int) -> nn.Dense:
    init = torch_uniform(fan_in)
    return nn.Dense(features, kernel_init=init, bias_init=init)


_MODEL = MnistCNN()
_IMAGES = (1, 28, 28, 1)


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
      rng: unused.
      axis_name: the mesh axis over which BatchNorm is synchronised, where a batch is cut.
    """
    del rng
    return image_loss(MnistCNN(axis_name), params, batch_stats, batch)


def predict(params: Any, batch_stats: Any, batch: Any) -> Any:
    """Returns the logits [batch, 10] of `batch["image"]`."""
    variables = {"params": params, "batch_stats": batch_stats}
    return _MODEL.apply(variables, batch["image"], train=False)


def prepare(rows: Arrays) -> Arrays:
    """Returns images as float32 [batch, 28, 28, 1] from 0 to 1, and labels as int32."""
    return {
        "image": (rows["image"] / np.float32(255))[..., None],
        "label": rows["label"].astype(np.int32),
    }


def load(options: TaskOptions) -> Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic data."""
    train, test = _data(options)
    return Task(
        name="mnist",
        train=train,
        test=test,
        prepare=prepare,
        init=init,
        loss_fn=partial(loss_fn, axis_name=options.axis_name),
        predict=predict,
        schedule=lambda steps: optax.constant_schedule(1e-4),
        optimizer=optax.adam,
        batch_size=256,
        epochs=10,
        devices=options.devices,
        batch_norms=batch_norms,
    )


def _data(options: TaskOptions) -> tuple[Arrays, Arrays]:
    if options.synthetic:
        return synthetic_data(60_000, seed=0), synthetic_data(10_000, seed=1)
    return read_mnist(options.data_dir)


def synthetic_data(count: int, seed: int) -> Arrays:
    """Returns noise with a bright bar for each label: MNIST's shapes, and learned in a few steps.

    Args:
      count: rows.
      seed: of the labels and the noise.
    """
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, count, np.uint8)
    images = random.integers(0, 128, (count, 28, 28), np.uint8)
    images[np.arange(count), 2 * labels + 4] += 127
    return {"image": images, "label": labels}


def read_mnist(data_dir: Path | None) -> tuple[Arrays, Arrays]:
    """Reads training and test data from MNIST's four files, gzipped or not.

    Args:
      data_dir: the folder they are in.

    Returns:
      Two dictionaries with `image`, uint8 [examples, 28, 28], and `label`, uint8 [examples].

    Raises:
      FileNotFoundError: files are missing; the message says for each where it is public.
      ValueError: a file is damaged or does not fit the others; the message names it.
    """
    paths = _find_files(data_dir)
    parts = []
    for prefix in ("train", "t10k"):
        image_path = paths[f"{prefix}-images-idx3-ubyte.gz"]
        label_path = paths[f"{prefix}-labels-idx1-ubyte.gz"]
        images, labels = read_idx(image_path, axes=3), read_idx(label_path, axes=1)
        if images.shape[1:] != (28, 28):
            size = " x ".join(map(str, images.shape[1:]))
            raise ValueError(f"{image_path} has images of {size} pixels, MNIST's are 28 x 28")
        if len(images) != len(labels):
            raise ValueError(
                f"{label_path} has {len(labels)} labels for {len(images)} images in {image_path}"
            )
        if not len(labels):
            raise ValueError(f"{image_path} has no images")
        if labels.max() >= CLASSES:
            row = int(np.argmax(labels >= CLASSES))
            raise ValueError(
                f"{label_path} has the label {labels[row]} at row {row}, "
                f"labels lie between 0 and {CLASSES - 1}"
            )
        parts.append({"image": images, "label": labels})
    return parts[0], parts[1]


def _find_files(data_dir: Path | None) -> dict[str, Path]:
    """Returns the path of each of `FILES`, gzipped or not."""
    if data_dir is None:
        raise FileNotFoundError(
            "task mnist wants --data-dir, the folder of these files (or --synthetic):"
            + "".join(_description(name) for name in FILES)
        )
    if not data_dir.is_dir():
        raise FileNotFoundError(f"--data-dir {data_dir} is no folder")
    found = {}
    for name in FILES:
        for path in (data_dir / name, data_dir / name.removesuffix(".gz")):
            if path.is_file():
                found[name] = path
                break
    missing = [name for name in FILES if name not in found]
    if missing:
        raise FileNotFoundError(
            f"--data-dir {data_dir} lacks these files of MNIST, gzipped or not:"
            + "".join(_description(name) for name in missing)
        )
    return found


def _description(name: str) -> str:
    size, sha256 = FILES[name]
    return f"\n  {name}: {ADDRESS}{name} ({size} bytes, sha256 {sha256})"
