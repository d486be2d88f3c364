"""PyTorch's first example of automatic mixed precision as a JAX script: a CNN on MNIST, in float16.

    python examples/mnist_amp.py DATA_DIR [EPOCHS]

The float32 version differs in the three lines marked AMP; comments above two of them show its lines.
Expected: about 99% of the test images right, in both.
"""

import sys
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import optax
from tasks.readers.public_images import read_mnist

import jmp_train as jt

# (channels, kernel, stride, padding) of each convolution
BLOCKS = ((32, 3, 1, 1), (64, 3, 1, 1), (64, 2, 2, 0), (128, 3, 1, 1), (128, 3, 1, 1),
          (128, 3, 1, 1), (128, 2, 2, 0), (256, 3, 1, 1), (256, 2, 1, 0), (512, 3, 1, 1),
          (512, 3, 1, 1), (512, 3, 1, 1), (512, 2, 2, 0), (1024, 3, 1, 1))  # fmt: skip


class CNN(nn.Module):
    """The model, without any code for precision."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, 10] of images [batch, 28, 28, 1]."""
        for channels, kernel, stride, padding in BLOCKS:
            x = nn.Conv(channels, (kernel, kernel), stride, padding)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(x))
        x = x.mean(axis=(1, 2))
        for features in (1000, 1000):
            x = nn.relu(nn.Dense(features)(x))
        return nn.Dense(10)(x)


model = CNN()


def prepare(examples: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns images as float32 [batch, 28, 28, 1] from 0 to 1, and labels as int32."""
    image = examples["image"][..., None] / np.float32(255)
    return {"image": image, "label": examples["label"].astype(np.int32)}


def loss_fn(params: Any, stats: Any, batch: Any, rng: Any) -> Any:
    """Returns the loss and the next batch statistics."""
    variables = {"params": params, "batch_stats": stats}
    logits, new = model.apply(variables, batch["image"], train=True, mutable=["batch_stats"])
    logits = logits.astype("float32")
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    return loss, (new["batch_stats"], None)


def main(data_dir: str, epochs: int = 10, batch_size: int = 256) -> None:
    """Trains, and prints the test accuracy after each epoch."""
    train, test = read_mnist(Path(data_dir))
    variables = model.init(jax.random.key(0), np.zeros((1, 28, 28, 1), "float32"), train=False)

    # float32: tx = optax.adam(1e-4)
    tx = jt.with_loss_scale(optax.adam(1e-4), jt.torch_loss_scale())  # AMP
    # float32: step = jt.train_step(loss_fn, tx)
    step = jt.train_step(loss_fn, tx, policy="autocast_float16")  # AMP
    step = jax.jit(step, donate_argnums=0)
    state = jt.TrainState.create(variables["params"], tx, model_state=variables["batch_stats"])

    def predict(params: Any, stats: Any, images: Any) -> Any:
        run = model.apply
        run = jt.autocast(run)  # AMP; float32 does without
        return run({"params": params, "batch_stats": stats}, images, train=False)

    for epoch in range(epochs):
        losses = []
        order = np.random.default_rng(epoch).permutation(len(train["label"]))
        for indices in np.split(order, range(batch_size, len(order), batch_size))[:-1]:
            batch = prepare({name: array[indices] for name, array in train.items()})
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        correct = 0
        for indices in np.array_split(np.arange(len(test["label"])), 10):
            batch = prepare({name: array[indices] for name, array in test.items()})
            logits = jax.jit(predict)(state.params, state.model_state, batch["image"])
            correct += np.sum(np.argmax(logits, -1) == batch["label"])
        accuracy = correct / len(test["label"])
        print(f"epoch {epoch + 1}  loss {np.mean(losses):.4f}  test accuracy {accuracy:.2%}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]))
