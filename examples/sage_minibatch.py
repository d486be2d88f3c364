"""Trains GraphSAGE in float16 on sampled mini-batches of a graph in host memory, with exact inference.

    python examples/sage_minibatch.py [--no-use-fp16] [--data-dir DIR | --scale 0.02] [--epochs 5]

The device holds one mini-batch at a time, whatever the size of the graph: a thread draws neighbors and gathers their
features ahead of the training step. Without Reddit's two files the graph is
synthetic, with that fraction of Reddit's nodes. Expected: more than 90% of the synthetic test nodes right.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import neighbor_batches
from jmp_train.graphs.datasets import synthetic_reddit


class SAGE(nnx.Module):
    """The model, without any code for precision."""

    def __init__(self, in_features: int, hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        self.first = graphs.SAGEConv(in_features, hidden, activation=nnx.relu, rngs=rngs)
        self.second = graphs.SAGEConv(hidden, classes, rngs=rngs)

    def __call__(self, blocks: tuple[graphs.Block, graphs.Block], h: jax.Array) -> jax.Array:
        """Returns logits [seeds, classes] of features [sources of the first block, in]."""
        return self.second(blocks[1], self.first(blocks[0], h))


def main(use_fp16: bool, data_dir: Path | None, scale: float, epochs: int) -> None:
    """Trains on mini-batches, and prints the accuracy of the whole graph's test nodes."""
    data = synthetic_reddit(scale) if data_dir is None else graphs.read_reddit(data_dir)
    edges = graphs.host_edges(data.senders, data.receivers, data.num_nodes)
    sampler = graphs.neighbor_sampler(edges, (10, 25), data.train, batch_size=256)
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    features = data.features.astype(policy.compute_dtype)

    def fetch(batch: graphs.MiniBatch) -> Any:
        return {
            "blocks": batch.blocks,
            "features": graphs.take_rows(features, batch.inputs),
            "label": graphs.take_rows(data.labels, batch.seeds),
            "is_seed": batch.seeds >= 0,  # the last batch of an epoch is padded
        }

    model = SAGE(features.shape[1], 256, data.num_classes, nnx.Rngs(0))
    structure, params = nnx.split(model)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["blocks"], batch["features"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype("float32"), batch["label"])
        return losses.mean(where=batch["is_seed"])

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale(enabled=use_fp16))
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), tx, policy=policy), donate_argnums=0)
    state = jt.TrainState.create(params, tx)
    for epoch in range(epochs):
        start, losses = time.perf_counter(), []
        for batch in neighbor_batches(sampler, data.train, fetch, seed=epoch):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        seconds = time.perf_counter() - start  # those of the first epoch are the compiler's, too
        print(f"epoch {epoch + 1}  loss {np.mean(losses):.4f}  {seconds:.2f} s")

    trained = nnx.merge(structure, policy.cast_to_compute(state.params))
    logits = graphs.layerwise_inference([trained.first, trained.second], edges, features)
    is_right = logits.argmax(-1)[data.test] == data.labels[data.test]
    print(f"test accuracy {is_right.mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=5)
    main(**vars(parser.parse_args()))
