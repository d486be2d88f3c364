"""Graph classification by a GIN, in float16: batches of small graphs, padded to few sizes.

    python examples/gin_proteins.py [--no-use-fp16] [--data-dir DIR | --count 1113] [--epochs 20]

`--data-dir` holds PROTEINS or another data set of TU Dortmund with node labels; without it, synthetic graphs have the
structure of PROTEINS. A step is compiled once per size. Expected: more than 80% of the synthetic test graphs right; at
most 95% are possible.
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
from jmp_train.data import graph_batches


class GIN(nnx.Module):
    """The model, without any code for precision."""

    def __init__(self, kinds: int, hidden: int, classes: int, rngs: nnx.Rngs) -> None:
        widths = (kinds, hidden, hidden)
        mlps = [
            nnx.Sequential(nnx.Linear(width, hidden, rngs=rngs), nnx.relu, nnx.Linear(hidden, hidden, rngs=rngs))
            for width in widths
        ]
        self.layers = nnx.List([graphs.GINConv(mlp) for mlp in mlps])
        self.norms = nnx.List([graphs.BatchNorm(hidden, momentum=0.9, rngs=rngs) for _ in mlps])
        self.out = nnx.Linear(2 * hidden, classes, rngs=rngs)

    def __call__(self, graph: graphs.Graph, h: jax.Array) -> jax.Array:
        """Returns logits [graphs, classes] of features [nodes, kinds]."""
        for layer, norm in zip(self.layers, self.norms, strict=True):
            h = nnx.relu(norm(layer(graph, h), mask=graphs.node_mask(graph)))
        return self.out(jnp.concatenate([graphs.mean_nodes(graph, h), graphs.max_nodes(graph, h)], axis=1))


def main(use_fp16: bool, data_dir: Path | None, count: int, epochs: int) -> None:
    """Trains on nine tenths of the graphs, and prints the accuracy of the others."""
    data = graphs.synthetic_proteins(count) if data_dir is None else graphs.read_tu(data_dir)
    kinds, classes = int(data.nodes["label"].max()) + 1, data.num_classes
    assert classes is not None, "the graphs have no classes"
    order = np.random.default_rng(0).permutation(len(data))
    test, train = np.split(order, [len(data) // 10])
    sizes = graphs.padded_sizes(data, 32)
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    structure, params, statistics = nnx.split(GIN(kinds, 64, classes, nnx.Rngs(0)), nnx.Param, nnx.BatchStat)

    def apply(params: Any, statistics: Any, graph: graphs.Graph, train: bool) -> tuple[jax.Array, Any]:
        model = nnx.merge(structure, params, statistics)
        model.train() if train else model.eval()
        dtype = jax.tree.leaves(params)[0].dtype  # a policy has cast the parameters, and one-hot kinds follow
        logits = model(graph, jax.nn.one_hot(graph.nodes["label"], kinds, dtype=dtype))
        return logits.astype(jnp.float32), nnx.state(model, nnx.BatchStat)

    def loss_fn(params: Any, statistics: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, Any]:
        logits, statistics = apply(params, statistics, batch["graph"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(where=graphs.graph_mask(batch["graph"])), (statistics, None)

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale(enabled=use_fp16))
    train_step, traces = jt.train_step(loss_fn, tx, policy=policy), []

    def step(state: jt.TrainState, batch: Any) -> tuple[jt.TrainState, Any]:
        traces.append(batch)  # once for each trace
        return train_step(state, batch)

    step = jax.jit(step, donate_argnums=0)
    state = jt.TrainState.create(params, tx, model_state=statistics)
    losses: list[jax.Array] = []
    for batch in graph_batches(data, 32, places=train, sizes=sizes, epochs=epochs, drop_remainder=True):
        state, metrics = step(state, batch)
        losses.append(metrics["loss"])
        if len(losses) == len(train) // 32:
            print(f"loss {np.mean(losses):.4f}")
            losses = []
    print(f"{len(traces)} traces for {len(sizes)} sizes")

    predict = jax.jit(lambda params, statistics, graph: apply(params, statistics, graph, train=False)[0])
    right = []
    for batch in graph_batches(data, 32, places=test, sizes=sizes, shuffle=False):
        logits = predict(policy.cast_to_compute(state.params), state.model_state, batch["graph"])
        right.append((logits.argmax(1) == batch["label"])[graphs.graph_mask(batch["graph"])])
    print(f"test accuracy {np.concatenate(right).mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--count", type=int, default=1113)
    parser.add_argument("--epochs", type=int, default=20)
    main(**vars(parser.parse_args()))
