"""Trains APPNP on citations in float16: a network per node, then ten hops in one loop.

    python examples/appnp_cora.py [--no-use-fp16] [--data-dir DIR] [--epochs 60]

`--data-dir` holds Cora's files; without it, a synthetic graph has Cora's size. Expected: more than 80% of Cora's test
nodes right, and more than 90% of the synthetic ones.
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
from jmp_train.graphs.datasets import synthetic_cora


class APPNP(nnx.Module):
    """The model of the paper; it has no code for precision."""

    def __init__(self, width: int, classes: int, rngs: nnx.Rngs) -> None:
        self.dropout = nnx.Dropout(0.5)
        self.hidden = nnx.Linear(width, 64, rngs=rngs)
        self.out = nnx.Linear(64, classes, rngs=rngs)
        self.hops = graphs.APPNPConv(k=10, alpha=0.1, edge_dropout=0.5, rngs=rngs)

    def __call__(self, graph: graphs.Graph, x: jax.Array, rngs: nnx.Rngs | None = None) -> jax.Array:
        """Returns logits [nodes, classes] of features [nodes, width]; with random streams, in training."""
        is_test = rngs is None
        h = nnx.relu(self.hidden(self.dropout(x, deterministic=is_test, rngs=rngs)))
        predicted = self.out(self.dropout(h, deterministic=is_test, rngs=rngs))
        return self.hops(graph, predicted, deterministic=is_test, rngs=rngs)


def main(use_fp16: bool, data_dir: Path | None, epochs: int) -> None:
    """Trains on the labeled nodes, and prints losses and the accuracy on the test nodes."""
    data = synthetic_cora() if data_dir is None else graphs.read_planetoid(data_dir)
    graph = graphs.add_self_loop(graphs.from_edges(data.senders, data.receivers, data.num_nodes))
    batch = {"graph": graph, "x": jnp.asarray(data.features), "label": jnp.asarray(data.labels)}
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    model = APPNP(data.features.shape[1], data.num_classes, nnx.Rngs(0))
    structure, params, streams = nnx.split(model, nnx.Param, ...)

    def loss_fn(params: Any, model_state: Any, batch: Any, rng: jax.Array | None) -> tuple[jax.Array, Any]:
        del model_state
        assert rng is not None
        logits = nnx.merge(structure, params, streams)(batch["graph"], batch["x"], nnx.Rngs(dropout=rng))
        logits, labels = logits[data.train].astype(jnp.float32), batch["label"][data.train]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
        kernel = params["hidden"]["kernel"][...].astype(jnp.float32)
        return loss + 2.5e-3 * jnp.square(kernel).sum(), (None, None)

    tx = jt.with_loss_scale(optax.adam(0.01), jt.torch_loss_scale(enabled=use_fp16))
    train_step, traces = jt.train_step(loss_fn, tx, policy=policy), []

    def step(state: jt.TrainState, batch: Any) -> tuple[jt.TrainState, Any]:
        traces.append(batch)  # once for each trace
        return train_step(state, batch)

    step = jax.jit(step, donate_argnums=0)
    state = jt.TrainState.create(params, tx, rng=jax.random.key(1))
    for epoch in range(1, epochs + 1):
        state, metrics = step(state, batch)
        if epoch % (epochs // 5) == 0:
            print(f"epoch {epoch}  loss {metrics['loss']:.4f}")
    print(f"{len(traces)} trace")

    @jax.jit
    def predict(params: Any, batch: Any) -> jax.Array:
        return nnx.merge(structure, params, streams)(batch["graph"], batch["x"])

    logits = predict(*policy.cast_to_compute((state.params, batch)))
    right = np.asarray(logits.argmax(1) == batch["label"])[data.test]
    print(f"test accuracy {right.mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--epochs", type=int, default=60)
    main(**vars(parser.parse_args()))
