"""Colossal-AI's tutorial of its AMP modes as a JAX script: ResNet-34 on CIFAR-10, in any mode.

    python examples/resnet34_cifar10.py --data-dir DIR --mode apex-O2
    python examples/resnet34_cifar10.py --synthetic --epochs 1 --config CONFIG.toml

DIR holds the binary version's files, of cifar-10-binary.tar.gz. A configuration has the tutorial's keys in a
table [fp16]. The lines under "AMP" set the precision; the rest is the float32 script.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from tasks.readers.public_images import read_cifar10

import jmp_train as jt
from jmp_train.data import array_batches

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # of red, green and blue

MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "torch": {"fp16": {"mode": jt.policies.AmpType.TORCH}},
    "apex-O1": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O1"}},
    "apex-O2": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O2"}},
    "apex-O3": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O3"}},
    "naive": {"fp16": {"mode": jt.policies.AmpType.NAIVE, "initial_scale": 2.0**16}},
}


def parse_args() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser()
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-dir", type=Path, help="the folder of data_batch_1.bin and so on")
    data.add_argument("--synthetic", action="store_true", help="synthetic data")
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--mode", choices=MODES, default="torch", help="default: torch")
    precision.add_argument("--config", metavar="TOML", help="a file with a table [fp16]")
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--train-size", type=int, help="only the first training examples")
    return parser.parse_args()


class Block(nn.Module):
    """Two convolutions of 3 x 3, added to the identity or, if the shape changes, to a projection."""

    features: int
    stride: int

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns [batch, rows / stride, columns / stride, features] of x [batch, rows, columns, channels]."""
        y = nn.relu(norm(train)(conv(self.features, 3, self.stride)(x)))
        y = norm(train)(conv(self.features, 3)(y))
        if x.shape != y.shape:
            x = norm(train)(conv(self.features, 1, self.stride)(x))
        return nn.relu(x + y)


class ResNet34(nn.Module):
    """torchvision's network with a stem for small images; it has no code for precision."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 32, 32, 3]."""
        x = nn.relu(norm(train)(conv(64, 3)(x)))
        for stage, blocks in enumerate((3, 4, 6, 3)):
            for block in range(blocks):
                x = Block(64 * 2**stage, stride=2 if stage and not block else 1)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def conv(features: int, size: int, stride: int = 1) -> nn.Conv:
    """Returns a convolution with torch's padding and He's initializer."""
    init = nn.initializers.variance_scaling(2.0, "fan_out", "normal")
    return nn.Conv(features, (size, size), stride, size // 2, use_bias=False, kernel_init=init)


def norm(train: bool) -> nn.BatchNorm:
    """Returns a BatchNorm with torch's defaults, whose momentum of 0.1 is flax's 0.9."""
    return nn.BatchNorm(use_running_average=not train, momentum=0.9)


def augment(images: jax.Array, key: jax.Array) -> jax.Array:
    """Returns images [batch, 32, 32, 3] cropped at random out of a black frame, and half of them flipped."""
    crop_key, flip_key = jax.random.split(key)
    corners = jax.random.randint(crop_key, (len(images), 2), 0, 9)
    flips = jax.random.bernoulli(flip_key, 0.5, (len(images),))

    def crop(image: jax.Array, corner: jax.Array, flip: jax.Array) -> jax.Array:
        cropped = jax.lax.dynamic_slice(image, (corner[0], corner[1], 0), (32, 32, 3))
        return jnp.where(flip, cropped[:, ::-1], cropped)

    framed = jnp.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)))
    return jax.vmap(crop)(framed, corners, flips)


def normalize(images: jax.Array | np.ndarray) -> jax.Array:
    """Returns bytes as float32 of mean 0 and standard deviation 1."""
    return (jnp.asarray(images, jnp.float32) / 255 - jnp.array(MEAN)) / jnp.array(STD)


def synthetic_cifar10(count: int, seed: int) -> dict[str, np.ndarray]:
    """Returns noise in a color for each label, as uint8 like CIFAR-10's files."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count, np.uint8)
    images = random.integers(0, 128, (count, 32, 32, 3), np.uint8)
    images += 60 * np.stack([labels % 3, labels // 3 % 3, labels // 9], axis=-1)[:, None, None]
    return {"image": images, "label": labels}


@jax.jit
def transform_train(batch: Any, key: jax.Array) -> Any:
    """Returns a batch with its images cropped, flipped and normalized, on the device."""
    return {**batch, "image": normalize(augment(batch["image"], key))}


def main() -> None:
    """Trains, and prints the test accuracy after each epoch."""
    args = parse_args()
    if args.synthetic:
        train, test = synthetic_cifar10(50_000, seed=0), synthetic_cifar10(10_000, seed=1)
    else:
        train, test = read_cifar10(args.data_dir)
    train = {name: array[: args.train_size] for name, array in train.items()}
    steps_per_epoch = len(train["label"]) // args.batch_size

    model = ResNet34()
    images = jnp.zeros((1, 32, 32, 3))
    variables = jax.jit(partial(model.init, train=False))(jax.random.key(0), images)
    schedule = optax.cosine_decay_schedule(0.1, args.epochs * steps_per_epoch)
    optimizer = optax.chain(optax.add_decayed_weights(5e-4), optax.sgd(schedule, momentum=0.9))

    def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
        del rng
        logits, new = model.apply(
            {"params": params, "batch_stats": stats},
            batch["image"],
            train=True,
            mutable=["batch_stats"],
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return losses.mean(), (new["batch_stats"], None)

    def predict(params: Any, stats: Any, images: Any) -> Any:
        return model.apply({"params": params, "batch_stats": stats}, images, train=False)

    # AMP
    amp = jt.amp_from_config(args.config or MODES[args.mode])
    amp, model = amp.for_model(model, images, train=False)
    loss_fn, optimizer = amp.transform(loss_fn, optimizer)
    predict = amp.forward(predict)

    step = jax.jit(jt.train_step(loss_fn, optimizer), donate_argnums=0)
    evaluate = jax.jit(lambda state, images: predict(state.params, state.model_state, normalize(images)))
    state = jt.TrainState.create(
        variables["params"],
        optimizer,
        model_state=amp.cast_model_state(variables["batch_stats"]),  # AMP
        cast_params=amp.cast_params,  # AMP
    )

    for epoch in range(args.epochs):
        start, losses, metrics = time.perf_counter(), [], {}
        key = jax.random.fold_in(jax.random.key(1), epoch)
        for number, batch in enumerate(array_batches(train, args.batch_size, seed=epoch)):
            batch = transform_train(batch, jax.random.fold_in(key, number))
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        loss, seconds = np.mean(jax.device_get(losses)), time.perf_counter() - start
        right = 0
        for first in range(0, len(test["label"]), args.batch_size):
            indices = slice(first, first + args.batch_size)
            logits = np.asarray(evaluate(state, test["image"][indices]))
            finite = np.isfinite(logits).all(-1)  # what overflows in half precision is a wrong answer
            right += np.sum(finite & (np.argmax(logits, -1) == test["label"][indices]))
        print(
            f"epoch {epoch + 1}  loss {loss:.4f}  loss scale {metrics['loss_scale']:g}  "
            f"skipped {metrics['skipped_steps']}  {seconds:.1f} s  "
            f"test accuracy {right / len(test['label']):.2%}"
        )


if __name__ == "__main__":
    main()
