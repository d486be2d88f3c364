"""Edge classification in float16: predicts the kind of an edge, from mini-batches of edges.

    python examples/edge_classification.py [--no-use-fp16] [--epochs 8]

Nodes belong to hidden groups, and the groups of both ends determine the kind of an edge. Features carry little
information about a group, but most neighbors belong to the same one. A tenth of the kinds is random. A batch has edges
and the neighbors of their ends; messages do not use the batch's edges or their reverses. A tenth of the edges is held
out. Expected: an accuracy above 0.8 on the held-out edges, and one trace of the step.
"""

import argparse
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import neighbor_batches

NODES, GROUPS, PAIRS, WIDTH, KINDS = 2_000, 6, 12_000, 32, 4


class EdgeClassifier(nnx.Module):
    """Logits of edges, of the rows of both ends; it has no code for precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = graphs.SAGEConv(WIDTH, 64, activation=nnx.relu, rngs=rngs)
        self.second = graphs.SAGEConv(64, 64, activation=nnx.relu, rngs=rngs)
        self.hidden = nnx.Linear(128, 64, rngs=rngs)
        self.logits = nnx.Linear(64, KINDS, rngs=rngs)

    def __call__(self, edges: graphs.EdgeMiniBatch, h: jax.Array) -> jax.Array:
        """Returns logits [edges, kinds] of features [sources of the first block, width]."""
        rows = self.second(edges.blocks[1], self.first(edges.blocks[0], h))
        return self.kinds(rows[edges.senders], rows[edges.receivers])

    def kinds(self, senders: jax.Array, receivers: jax.Array) -> jax.Array:
        """Returns logits [edges, kinds] of the rows [edges, 64] of their ends, the same in both directions."""
        both = jnp.concatenate([senders + receivers, senders * receivers], axis=1)
        return self.logits(nnx.relu(self.hidden(both)))


def drawn_graph(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns pairs of connected nodes [2, pairs], each once, their kinds [pairs], and features [nodes, width]."""
    group = random.integers(0, GROUPS, NODES)
    by_group = np.argsort(group, kind="stable")
    starts = np.searchsorted(group[by_group], np.arange(GROUPS + 1))
    first = random.integers(0, NODES, PAIRS)
    low, high = starts[group[first]], starts[group[first] + 1]
    within = by_group[low + (random.random(PAIRS) * (high - low)).astype(int)]
    second = np.where(random.random(PAIRS) < 0.7, within, random.integers(0, NODES, PAIRS))
    pairs = np.sort(np.stack([first, second]), axis=0)
    pairs = random.permutation(np.unique(pairs[:, pairs[0] != pairs[1]], axis=1), axis=1)
    kinds = group[pairs].sum(0) % KINDS
    is_drawn = random.random(pairs.shape[1]) < 0.1
    kinds = np.where(is_drawn, random.integers(0, KINDS, pairs.shape[1]), kinds)
    features = random.normal(size=(GROUPS, WIDTH))[group] + 2 * random.normal(size=(NODES, WIDTH))
    return pairs, kinds.astype(np.int32), (features / 4).astype(np.float32)


def main(use_fp16: bool, epochs: int) -> None:
    """Trains on most edges, and prints the accuracy on those that were held out."""
    pairs, kinds, features = drawn_graph(np.random.default_rng(0))
    count = pairs.shape[1]
    senders, receivers = np.concatenate([pairs, pairs[::-1]], axis=1)
    edges = graphs.host_edges(senders, receivers, NODES, keep_edge_ids=True)
    reverse = np.concatenate([np.arange(count) + count, np.arange(count)])
    sampler = graphs.edge_sampler(
        edges, (10, 10), senders, receivers, batch_size=256, exclude="reverse", reverse_ids=reverse
    )
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    structure, params = nnx.split(EdgeClassifier(nnx.Rngs(0)))
    traces = 0

    def fetch(batch: graphs.EdgeMiniBatch) -> Any:
        rows = graphs.take_rows(features, batch.inputs, policy.compute_dtype)
        return {"edges": batch, "features": rows, "label": graphs.take_rows(kinds, batch.edge_ids)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["edges"], batch["features"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"])
        return losses.mean(where=batch["edges"].edge_ids >= 0)

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale(enabled=use_fp16))
    train_step = jt.train_step(jt.stateless(loss_fn), tx, policy=policy)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: jt.TrainState, batch: Any) -> tuple[jt.TrainState, Any]:
        nonlocal traces
        traces += 1  # when the step is traced, and not when it runs
        return train_step(state, batch)

    state = jt.TrainState.create(params, tx)
    known = np.arange(count // 10, count)  # all edges are there, and of these the kind is known
    for epoch in range(epochs):
        losses = []
        for batch in neighbor_batches(sampler, known, fetch, seed=epoch):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        print(f"epoch {epoch + 1}  loss {np.mean(losses):.4f}")

    trained = nnx.merge(structure, policy.cast_to_compute(state.params))
    inputs = features.astype(policy.compute_dtype)
    rows = graphs.layerwise_inference([trained.first, trained.second], edges, inputs)
    held_out = slice(count // 10)
    logits = trained.kinds(*jnp.asarray(rows)[pairs[:, held_out]])
    accuracy = np.mean(np.asarray(logits).argmax(1) == kinds[held_out])
    print(f"accuracy {accuracy:.3f}  traces {traces}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
