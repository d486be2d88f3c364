"""The training script of DGL's mixed-precision guide in JAX: a GAT on Reddit's graph, in float16.

    python examples/gat_reddit.py [--no-use-fp16] [--data-dir DIR | --scale 0.002] [--epochs 100]

Without Reddit's two files the graph is synthetic, with that fraction of Reddit's nodes. Expected: more than 95% of
the synthetic test nodes right, in float16 and, with --no-use-fp16, in float32.
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
from jmp_train.graphs import GATConv, Graph, NodeData, from_edges, read_reddit
from jmp_train.graphs.datasets import synthetic_reddit


class GAT(nnx.Module):
    """The model, without any code for precision."""

    def __init__(self, widths: tuple[int, int, int], heads: tuple[int, int, int], seed: int) -> None:
        features, hidden, classes = widths
        rngs = nnx.Rngs(seed)
        self.first = GATConv(features, hidden, heads[0], activation=nnx.elu, rngs=rngs)
        self.second = GATConv(hidden * heads[0], hidden, heads[1], activation=nnx.elu, rngs=rngs)
        self.third = GATConv(hidden * heads[1], classes, heads[2], rngs=rngs)

    def __call__(self, graph: Graph, h: jax.Array) -> jax.Array:
        """Returns logits [nodes, 41] of features [nodes, 602]."""
        for layer in (self.first, self.second):
            h = layer(graph, h).reshape(graph.num_nodes, -1)
        return self.third(graph, h).mean(axis=1)


def make_graph(data: NodeData) -> Graph:
    """Returns the graph with one self-loop at each node, sorted by receiver and kept as CSR only."""
    n_node = data.num_nodes
    is_self_loop = data.senders == data.receivers
    edges = data.receivers[~is_self_loop].astype(np.int64) * n_node + data.senders[~is_self_loop]
    edges = np.sort(np.append(edges, np.arange(n_node) * (n_node + 1)))
    return from_edges(edges % n_node, edges // n_node, n_node, formats=("csr",))


def main(use_fp16: bool, data_dir: Path | None, scale: float, epochs: int) -> None:
    """Trains on all nodes at once, and prints the test accuracy."""
    data = synthetic_reddit(scale) if data_dir is None else read_reddit(data_dir)
    widths = data.features.shape[1], 256, data.num_classes
    model, params = nnx.split(GAT(widths, (1, 1, 1), seed=0))

    def predict(params: Any, batch: Any) -> jax.Array:
        return nnx.merge(model, params)(batch["graph"], batch["features"])

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = predict(params, batch).astype("float32")
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(where=batch["train_mask"])

    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    adam = optax.chain(optax.add_decayed_weights(5e-4), optax.adam(1e-3))
    tx = jt.with_loss_scale(adam, jt.torch_loss_scale(enabled=use_fp16))
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), tx, policy=policy), donate_argnums=0)
    state = jt.TrainState.create(params, tx)
    train_mask = np.isin(np.arange(data.num_nodes), data.train)
    batch = {"features": data.features, "label": data.labels, "train_mask": train_mask}
    batch = jax.device_put(policy.cast_to_compute(batch)) | {"graph": make_graph(data)}

    for epoch in range(epochs):
        start = time.perf_counter()
        state, metrics = step(state, batch)
        loss, loss_scale = float(metrics["loss"]), float(metrics["loss_scale"])
        seconds = time.perf_counter() - start  # those of the first one are the compiler's, too
        print(f"epoch {epoch + 1}  loss {loss:.4f}  loss scale {loss_scale:g}  {seconds:.2f} s")

    logits = jax.jit(jt.apply_policy(predict, policy))(state.params, batch)
    is_right = np.argmax(logits, -1)[data.test] == data.labels[data.test]
    print(f"test accuracy {is_right.mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--scale", type=float, default=0.002)
    parser.add_argument("--epochs", type=int, default=100)
    main(**vars(parser.parse_args()))
