"""A CNN on MNIST by `pmap`, in float16: each process loads the batches of its own devices.

    python examples/data_parallel/pmap_mnist.py --data-dir DIR
    jmp-train launch -n 2 -- examples/data_parallel/pmap_mnist.py --data-dir DIR

Without --data-dir it trains on synthetic images. BatchNorm computes statistics over all devices, so that
results do not depend on their number. Expected: about 97% of MNIST's test images right after two epochs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jmp_train as jt
from jmp_train.data import array_batches


class CNN(nn.Module):
    """Three convolutions and a dense layer; `axis_name` is set in training on several devices."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 28, 28, 1]."""
        train = self.axis_name is not None
        for features in (16, 32, 64):
            x = nn.Conv(features, (3, 3), strides=2, use_bias=False)(x)
            norm = nn.BatchNorm(not train, momentum=0.9, axis_name=self.axis_name)
            x = nn.relu(norm(x))
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
    """Returns the loss and the next batch statistics."""
    del rng
    variables = {"params": params, "batch_stats": stats}
    logits, new = CNN("data").apply(variables, batch["image"], mutable=["batch_stats"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
    return losses.mean(), (new["batch_stats"], None)


@jax.jit
def predict(params: Any, stats: Any, images: Any) -> Any:
    """Returns the logits, computed in float16."""
    params, images = jt.get_policy("mixed_float16").cast_to_compute((params, images))
    return CNN().apply({"params": params, "batch_stats": stats}, images)


def prepare(examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns images as float32 [batch, 28, 28, 1] from 0 to 1, and labels as int32."""
    image = examples["image"][..., None] / np.float32(255)
    return {"image": image, "label": examples["label"].astype(np.int32)}


def synthetic_mnist(count: int, seed: int) -> dict[str, np.ndarray]:
    """Returns noise with a bright bar for each label, as uint8 like MNIST's files."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count, np.uint8)
    images = random.integers(0, 128, (count, 28, 28), np.uint8)
    images[np.arange(count), 2 * labels + 4] += 127
    return {"image": images, "label": labels}


def main() -> None:
    """Trains, and prints the test accuracy after each epoch."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=256, help="of all devices together")
    parser.add_argument("--train-size", type=int)
    args = parser.parse_args()

    jt.distributed.initialize()
    if args.data_dir:
        sys.path.append(str(Path(__file__).parents[1]))
        from tasks.readers.public_images import read_mnist

        train, test = read_mnist(args.data_dir)
    else:
        train, test = synthetic_mnist(10_000, seed=0), synthetic_mnist(1_000, seed=1)
    train = {name: array[: args.train_size] for name, array in train.items()}

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale())
    run = jt.pmap_step(jt.train_step(loss_fn, tx, policy="mixed_float16"), donate_argnums=0)
    variables = CNN().init(jax.random.key(0), np.zeros((1, 28, 28, 1), np.float32))
    state = jt.TrainState.create(variables["params"], tx, model_state=variables["batch_stats"])
    state = jt.distributed.broadcast_state(state)

    losses = []
    steps_per_epoch = len(train["label"]) // args.batch_size
    batches = array_batches(train, args.batch_size, epochs=args.epochs, prepare=prepare)
    for number, batch in enumerate(batches, start=1):
        state, metrics = run(state, batch)
        losses.append(float(metrics["loss"]))
        if number % steps_per_epoch == 0 and jt.distributed.is_main_process():
            params, stats = jax.device_get((state.params, state.model_state))
            images = prepare(test)["image"]
            parts = [np.asarray(predict(params, stats, part)) for part in np.split(images, 10)]
            accuracy = np.mean(np.concatenate(parts).argmax(-1) == test["label"])
            loss = np.mean(losses[-steps_per_epoch:])
            epoch = number // steps_per_epoch
            print(f"epoch {epoch}  loss {loss:.4f}  test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main()
