"""ColossalAI's benchmark of its AMP modes as a JAX script: ViT-B/16 on a folder of images, in any mode.

    python examples/vit_imagenet.py --data-dir DIR --mode torch       # DIR/train/CLASS/*.jpg, DIR/val/CLASS/*.jpg
    python examples/vit_imagenet.py --synthetic --image-size 64 --mode apex-O2

Without the lines marked AMP, it trains in float32. On a CPU, use --synthetic with a few small images.
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from tasks.readers.image_folder import center_crops, random_crops, read_image_folder

import jmp_train as jt
from jmp_train.data import array_batches

# Of the red, green and blue of ImageNet's training images, from 0 to 255.
MEAN, STD = np.array((123.7, 116.3, 103.5)), np.array((58.4, 57.1, 57.4))

MODES: dict[str, dict[str, Any]] = {
    "float32": {},
    "torch": {"fp16": {"mode": jt.policies.AmpType.TORCH}},
    "apex-O1": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O1"}},
    "apex-O2": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O2"}},
    "apex-O3": {"fp16": {"mode": jt.policies.AmpType.APEX, "opt_level": "O3"}},
    "naive": {"fp16": {"mode": jt.policies.AmpType.NAIVE, "initial_scale": 2.0**16}},
}


class ViT(nn.Module):
    """ViT-B/16 with dropout 0.1; softmax is in float32."""

    classes: int

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        """Returns logits [batch, classes] of images [batch, height, width, 3]."""
        normal = nn.initializers.normal(0.02)
        patches = nn.Conv(768, (16, 16), strides=16, padding="VALID")(images)
        patches = patches.reshape(len(patches), -1, 768)
        first = jnp.tile(self.param("class_token", normal, (1, 1, 768)), (len(patches), 1, 1))
        x = jnp.concatenate([first.astype(patches.dtype), patches], axis=1)
        positions = self.param("positions", normal, (1, *x.shape[1:]))
        x = nn.Dropout(0.1, deterministic=not train)(x + positions.astype(x.dtype))
        for _ in range(12):
            x = nn.remat(Block, static_argnums=2)()(x, train)
        return nn.Dense(self.classes, kernel_init=nn.initializers.zeros)(nn.LayerNorm()(x)[:, 0])


class Block(nn.Module):
    """Attention and two dense layers, each after a norm and added to its input."""

    @nn.compact
    def __call__(self, x: jax.Array, train: bool) -> jax.Array:
        """Returns tokens [batch, tokens, 768]."""
        dense = partial(nn.Dense, kernel_init=nn.initializers.normal(0.02))
        dropout = partial(nn.Dropout, 0.1, deterministic=not train)
        y = attention(dense(3 * 768)(nn.LayerNorm()(x)), heads=12)
        x = x + dropout()(dense(768)(y))
        y = nn.gelu(dense(3072)(nn.LayerNorm()(x)), approximate=False)
        return x + dropout()(dense(768)(dropout()(y)))


def attention(query_key_value: jax.Array, heads: int) -> jax.Array:
    """Returns the attention of all tokens of an image [batch, tokens, width]; softmax is in float32."""
    batch, tokens, width = query_key_value.shape
    parts = query_key_value.reshape(batch, tokens, 3, heads, width // (3 * heads))
    query, key, value = parts[:, :, 0], parts[:, :, 1], parts[:, :, 2]
    logits = jnp.einsum("bqhd,bkhd->bhqk", query * query.shape[-1] ** -0.5, key)
    weights = nn.softmax(logits.astype(jnp.float32)).astype(value.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, tokens, -1)


def normalized(images: jax.Array, dtype: Any) -> jax.Array:
    """Returns bytes as floats of mean 0 and standard deviation 1, computed in float32."""
    return ((images.astype(jnp.float32) - jnp.float32(MEAN)) / jnp.float32(STD)).astype(dtype)


def synthetic_images(count: int, size: int, seed: int) -> Any:
    """Returns noise in a color for each of ten labels."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, count, np.int32)
    colors = np.random.default_rng(0).integers(0, 129, (10, 3), np.uint8)
    images = random.integers(0, 128, (count, size, size, 3), np.uint8)
    return {"image": images + colors[labels][:, None, None], "label": labels}


def read(args: argparse.Namespace) -> tuple[Any, Any, Callable[..., Any], Callable[..., Any]]:
    """Returns training and test data, and a function that makes batches: with seeds for training only."""
    size = args.image_size
    if args.synthetic:
        train, test = synthetic_images(1024, size, seed=0), synthetic_images(128, size, seed=1)
        return train, test, lambda examples, seeds: examples, lambda examples: examples
    train, test, _ = read_image_folder(args.data_dir)

    def augment(examples: Any, seeds: np.ndarray) -> Any:
        return {"image": random_crops(examples["path"], seeds, size), "label": examples["label"]}

    def prepare(examples: Any) -> Any:
        return {"image": center_crops(examples["path"], size), "label": examples["label"]}

    order = np.random.default_rng(0).permutation(len(train["label"]))  # they come class by class
    return {name: array[order] for name, array in train.items()}, test, augment, prepare


def main(args: argparse.Namespace) -> None:
    """Trains, and prints the loss of each epoch and the test accuracy."""
    train, test, augment, prepare = read(args)
    train = {name: array[: args.train_size] for name, array in train.items()}
    epochs = args.epochs or (1 if args.synthetic else 300)
    steps_per_epoch = len(train["label"]) // args.batch_size

    model = ViT(classes=int(train["label"].max()) + 1)
    images = jax.ShapeDtypeStruct((1, args.image_size, args.image_size, 3), jnp.float32)
    init = jax.jit(lambda key: model.init(key, jnp.zeros(images.shape), train=False))
    params = init(jax.random.key(0))["params"]

    def loss_fn(params: Any, state: Any, batch: Any, rng: Any) -> Any:
        pixels = normalized(batch["image"], params["positions"].dtype)
        logits = model.apply({"params": params}, pixels, train=True, rngs={"dropout": rng})
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.asarray(logits, jnp.float32), batch["label"])
        return losses.mean(), (state, None)

    def predict(params: Any, state: Any, images: Any) -> Any:
        del state
        pixels = normalized(images, params["positions"].dtype)
        return model.apply({"params": params}, pixels, train=False)

    steps = epochs * steps_per_epoch
    up, down = optax.linear_schedule(0, 1e-2, steps // 6), optax.linear_schedule(1e-2, 0, steps)
    rate = optax.join_schedules([up, down], [steps // 6])
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1), optax.sgd(rate))

    amp = jt.amp_from_config(MODES[args.mode])  # AMP
    amp, model = amp.for_model(model, images, train=False)  # AMP
    loss_fn, tx = amp.transform(loss_fn, tx)  # AMP
    predict = amp.forward(predict)  # AMP

    step = jax.jit(jt.train_step(loss_fn, tx), donate_argnums=0)
    state = jt.TrainState.create(params, tx, rng=jax.random.key(1), cast_params=amp.cast_params)  # AMP: cast_params

    losses, start = [], time.perf_counter()
    threads = min(16, os.cpu_count() or 1)
    for batch in array_batches(train, args.batch_size, epochs=epochs, augment=augment, num_threads=threads):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        if len(losses) == steps_per_epoch:
            mean, seconds = float(np.mean(losses)), time.perf_counter() - start
            print(
                f"epoch {int(state.step) // steps_per_epoch}  loss {mean:.4f}  loss scale {metrics['loss_scale']:g}  "
                f"skipped {metrics['skipped_steps']}  {seconds:.1f} s"
            )
            losses, start = [], time.perf_counter()
    correct, predict = 0, jax.jit(predict)
    for first in range(0, len(test["label"]), args.batch_size):
        indices = slice(first, first + args.batch_size)
        batch = prepare({name: array[indices] for name, array in test.items()})
        logits = predict(state.params, state.model_state, batch["image"])
        correct += int(np.sum(np.argmax(logits, -1) == batch["label"]))
    print(f"test accuracy {correct / len(test['label']):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data = parser.add_mutually_exclusive_group(required=True)
    data.add_argument("--data-dir", type=Path, metavar="DIR", help="with train/CLASS and val/CLASS")
    data.add_argument("--synthetic", action="store_true", help="synthetic images of ten classes")
    parser.add_argument("--image-size", type=int, default=224, metavar="N", help="a multiple of 16; default: 224")
    parser.add_argument("--train-size", type=int, metavar="N", help="only the first N training examples")
    parser.add_argument("--epochs", type=int, help="default: 300, of synthetic images 1")
    parser.add_argument("--batch-size", type=int, default=128, help="default: 128")
    parser.add_argument("--mode", choices=MODES, default="torch", help="default: torch")
    main(parser.parse_args())
