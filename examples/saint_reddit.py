"""GraphSAINT in float16: training on random subgraphs of a graph in the host's memory, with their normalization.

    python examples/saint_reddit.py [--no-use-fp16] [--data-dir DIR | --synthetic --scale 0.02] [--epochs 10]

Each batch is the subgraph of the nodes of some random walks. Factors of edges and of losses, measured once, make its
sums unbiased estimates of the whole graph's. Expected: more than 90% of the synthetic test nodes right.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import neighbor_batches
from jmp_train.graphs.datasets import synthetic_reddit


class SAINT(nnx.Module):
    """Two layers of weighted means over neighbors, each next to a node's own row."""

    def __init__(self, in_features: int, hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        self.own = nnx.List([nnx.Linear(width, hidden, rngs=rngs) for width in (in_features, hidden)])
        self.near = nnx.List([nnx.Linear(width, hidden, rngs=rngs) for width in (in_features, hidden)])
        self.last = nnx.Linear(hidden, classes, rngs=rngs)

    def __call__(self, graph: graphs.Graph, h: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, in] and the weights of edges."""
        for own, near in zip(self.own, self.near, strict=True):
            means = graphs.graph_conv(graph, h, edge_weight=weights, norm="none", allow_zero_in_degree=True)
            h = nnx.relu(own(h) + near(means))
        return self.last(h)


def main(use_fp16: bool, synthetic: bool, data_dir: Path | None, scale: float, epochs: int) -> None:
    """Trains on subgraphs, and prints the accuracy of the whole graph's test nodes."""
    del synthetic  # data are synthetic without a folder
    data = synthetic_reddit(scale) if data_dir is None else graphs.read_reddit(data_dir)
    edges = graphs.host_edges(data.senders, data.receivers, data.num_nodes)
    size = max(data.num_nodes // 16, 1)
    sampler = graphs.saint_sampler(edges, "walk", batch_size=size, length=2, num_trials=200)
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    features = data.features.astype(policy.compute_dtype)
    is_train = np.isin(np.arange(data.num_nodes), data.train)
    mean_of = (1 / np.maximum(edges.in_degrees, 1)).astype(np.float32)

    def fetch(batch: graphs.SubgraphBatch) -> Any:
        ids = np.asarray(batch.graph.receivers)
        of_receivers = graphs.take_rows(mean_of, np.append(batch.nodes, -1)[ids])
        return {
            "graph": batch.graph,
            "weights": np.asarray(batch.graph.edges["norm"]) * of_receivers,
            "features": graphs.take_rows(features, batch.nodes),
            "label": graphs.take_rows(data.labels, batch.nodes),
            "factor": batch.node_norm * graphs.take_rows(is_train, batch.nodes) * data.num_nodes / len(data.train),
        }

    model = SAINT(features.shape[1], 128, data.num_classes, nnx.Rngs(0))
    structure, params = nnx.split(model)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["graph"], batch["features"], batch["weights"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return (losses * batch["factor"].astype(jnp.float32)).sum()

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale(enabled=use_fp16))
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), tx, policy=policy), donate_argnums=0)
    state = jt.TrainState.create(params, tx)
    for epoch in range(epochs):
        losses = []
        for batch in neighbor_batches(sampler, np.arange(data.num_nodes), fetch, seed=epoch, drop_remainder=True):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        print(f"epoch {epoch + 1}  loss {np.mean(losses):.4f}")

    graph = graphs.from_edges(data.senders, data.receivers, data.num_nodes)
    weights = jnp.asarray(mean_of)[graph.receivers]
    logits = jax.jit(nnx.merge(structure, state.params))(graph, jnp.asarray(data.features), weights)
    is_right = np.asarray(logits).argmax(-1)[data.test] == data.labels[data.test]
    print(f"test accuracy {is_right.mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--synthetic", action="store_true", help="synthetic data, the default without --data-dir")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--scale", type=float, default=0.02)
    parser.add_argument("--epochs", type=int, default=10)
    main(**vars(parser.parse_args()))
