"""Link prediction in float16: predicts which nodes are connected, from mini-batches of edges.

    python examples/link_prediction.py [--no-use-fp16] [--epochs 8]

Nodes belong to communities, most edges stay within one, and features carry little information about it. A tenth of the
edges is held out. A batch has edges, new random negatives, and the neighbors of all these; messages do not use the
batch's edges or their reverses. Expected: an AUC above 0.9 on the held-out edges.
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
from jmp_train.data import neighbor_batches

NODES, COMMUNITIES, PAIRS, WIDTH, NEGATIVES = 2_000, 20, 16_000, 32, 4


class Encoder(nnx.Module):
    """Rows of nodes, whose products are the logits of links; it has no code for precision."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = graphs.SAGEConv(WIDTH, 64, activation=nnx.relu, rngs=rngs)
        self.second = graphs.SAGEConv(64, 32, rngs=rngs)

    def __call__(self, blocks: tuple[graphs.Block, graphs.Block], h: jax.Array) -> jax.Array:
        """Returns rows [ends of the edges, 32] of features [sources of the first block, in]."""
        return self.second(blocks[1], self.first(blocks[0], h))


def drawn_graph(random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns pairs of connected nodes [2, pairs], each once, and features [nodes, width]."""
    community = random.integers(0, COMMUNITIES, NODES)
    by_community = np.argsort(community, kind="stable")
    starts = np.searchsorted(community[by_community], np.arange(COMMUNITIES + 1))
    first = random.integers(0, NODES, PAIRS)
    low, high = starts[community[first]], starts[community[first] + 1]
    within = by_community[low + (random.random(PAIRS) * (high - low)).astype(int)]
    second = np.where(random.random(PAIRS) < 0.9, within, random.integers(0, NODES, PAIRS))
    pairs = np.sort(np.stack([first, second]), axis=0)
    pairs = np.unique(pairs[:, pairs[0] != pairs[1]], axis=1)
    means = random.normal(size=(COMMUNITIES, WIDTH))
    features = means[community] + 2 * random.normal(size=(NODES, WIDTH))
    return random.permutation(pairs, axis=1), (features / 4).astype(np.float32)


def main(use_fp16: bool, epochs: int) -> None:
    """Trains on most edges, and prints AUC and mean reciprocal rank of the others."""
    random = np.random.default_rng(0)
    pairs, features = drawn_graph(random)
    held_out, known = np.split(pairs, [pairs.shape[1] // 10], axis=1)
    senders, receivers = np.concatenate([known, known[::-1]], axis=1)
    edges = graphs.host_edges(senders, receivers, NODES, keep_edge_ids=True)
    sampler = graphs.edge_sampler(
        edges,
        (10, 10),
        senders,
        receivers,
        batch_size=512,
        negatives=NEGATIVES,
        exclude="reverse",
        reverse_ids=graphs.reverse_edge_ids(senders, receivers, NODES),
    )
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    structure, params = nnx.split(Encoder(nnx.Rngs(0)))

    def fetch(batch: graphs.EdgeMiniBatch) -> Any:
        return {"edges": batch, "features": graphs.take_rows(features, batch.inputs, policy.compute_dtype)}

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        edges = batch["edges"]
        rows = nnx.merge(structure, params)(edges.blocks, batch["features"]).astype(jnp.float32)
        sent = rows[edges.senders][:, None]
        others = jnp.concatenate([edges.receivers[:, None], edges.negative_receivers], axis=1)
        logits = (sent * rows[others]).sum(-1) / 32**0.5
        losses = optax.sigmoid_binary_cross_entropy(logits, jnp.zeros_like(logits).at[:, 0].set(1))
        return losses.mean(where=(edges.edge_ids >= 0)[:, None])

    tx = jt.with_loss_scale(optax.adam(3e-3), jt.torch_loss_scale(enabled=use_fp16))
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), tx, policy=policy), donate_argnums=0)
    state = jt.TrainState.create(params, tx)
    for epoch in range(epochs):
        losses = []
        for batch in neighbor_batches(sampler, np.arange(edges.num_edges), fetch, seed=epoch):
            state, metrics = step(state, batch)
            losses.append(metrics["loss"])
        print(f"epoch {epoch + 1}  loss {np.mean(losses):.4f}")

    trained = nnx.merge(structure, policy.cast_to_compute(state.params))
    inputs = features.astype(policy.compute_dtype)
    rows = graphs.layerwise_inference([trained.first, trained.second], edges, inputs).astype(np.float32)
    both = np.concatenate([pairs, pairs[::-1]], axis=1)
    negatives = graphs.global_negatives(random, both[0], both[1], NODES, held_out.shape[1])
    positive, negative = ((rows[ends[0]] * rows[ends[1]]).sum(-1) for ends in (held_out, negatives))
    labels = np.repeat([1, 0], [len(positive), len(negative)])
    among = rows[random.integers(0, NODES, (len(positive), 50))]
    rank = graphs.mean_reciprocal_rank(positive, (rows[held_out[0]][:, None] * among).sum(-1))
    print(f"AUC {graphs.roc_auc(labels, np.concatenate([positive, negative])):.3f}  MRR {rank:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--epochs", type=int, default=8)
    main(**vars(parser.parse_args()))
