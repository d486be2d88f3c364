"""Classification of point clouds by dynamic edge convolutions, in float16.

    python examples/edgeconv_shapes.py [--no-use-fp16] [--count 480] [--epochs 16]

Clouds are points on rotated spheres, cubes, cylinders and cones, with noise. Each layer connects every point to those
with the nearest features. Expected: about 90% of the test clouds right; chance level is 25%.
"""

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train import graphs

POINTS, BATCH = 40, 32


def make_clouds(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns points, float32 [clouds, POINTS, 3], and the shape of each cloud, 0 to 3."""
    random = np.random.default_rng(0)
    label = random.integers(0, 4, count)
    directions = random.normal(size=(count, POINTS, 3))
    height, angle = random.uniform(-1, 1, (count, POINTS)), random.uniform(0, 2 * np.pi, (count, POINTS))
    circle = np.stack([np.cos(angle), np.sin(angle)], -1)
    radius = ((1 - height) / 2)[..., None]
    shapes = [
        directions / np.linalg.norm(directions, axis=-1, keepdims=True),
        directions / np.abs(directions).max(-1, keepdims=True),
        np.concatenate([circle, height[..., None]], -1),
        np.concatenate([circle * radius, height[..., None]], -1),
    ]
    points = np.stack(shapes, 1)[np.arange(count), label]
    turns, _ = np.linalg.qr(random.normal(size=(count, 3, 3)))
    points = points @ turns + random.normal(scale=0.02, size=points.shape)
    return points.astype(np.float32), label.astype(np.int32)


class DGCNN(nnx.Module):
    """The model, without any code for precision."""

    def __init__(self, classes: int, rngs: nnx.Rngs) -> None:
        network = nnx.Sequential(nnx.relu, nnx.Linear(32, 32, rngs=rngs))
        self.first = graphs.DynamicEdgeConv(3, 32, network, k=8, rngs=rngs)
        self.second = graphs.DynamicEdgeConv(32, 64, nnx.relu, k=8, rngs=rngs)
        self.hidden = nnx.Linear(2 * (32 + 64), 64, rngs=rngs)
        self.out = nnx.Linear(64, classes, rngs=rngs)

    def __call__(self, points: jax.Array) -> jax.Array:
        """Returns logits [clouds, classes] of points [clouds, points, 3]."""
        first = self.first(points)
        both = jnp.concatenate([first, self.second(nnx.relu(first))], -1)
        return self.out(nnx.relu(self.hidden(jnp.concatenate([both.max(1), both.mean(1)], -1))))


def main(use_fp16: bool, count: int, epochs: int) -> None:
    """Trains on three quarters of the clouds, and prints losses and the accuracy on the others."""
    points, label = make_clouds(count)
    test = count // 4
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    structure, params = nnx.split(DGCNN(4, nnx.Rngs(0)))

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["points"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    tx = jt.with_loss_scale(optax.adam(2e-3), jt.torch_loss_scale(enabled=use_fp16))
    train_step, traces = jt.train_step(jt.stateless(loss_fn), tx, policy=policy), []

    def step(state: jt.TrainState, batch: Any) -> tuple[jt.TrainState, Any]:
        traces.append(batch)  # once for each trace
        return train_step(state, batch)

    step = jax.jit(step, donate_argnums=0)
    state, random = jt.TrainState.create(params, tx), np.random.default_rng(1)
    for epoch in range(1, epochs + 1):
        order = test + random.permutation(count - test)
        losses = []
        for rows in order[: len(order) // BATCH * BATCH].reshape(-1, BATCH):
            state, metrics = step(state, {"points": points[rows], "label": label[rows]})
            losses.append(metrics["loss"])
        print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
    print(f"{len(traces)} trace")
    predict = jax.jit(lambda params, points: nnx.merge(structure, params)(points).argmax(-1))
    found = predict(*policy.cast_to_compute((state.params, jnp.asarray(points[:test]))))
    print(f"test accuracy {np.mean(found == label[:test]):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--count", type=int, default=480)
    parser.add_argument("--epochs", type=int, default=16)
    main(**vars(parser.parse_args()))
