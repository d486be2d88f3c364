"""node2vec in float16: rows of nodes from random walks, with a linear probe of their classes.

    python examples/node2vec.py [--no-use-fp16] [--graph karate | cora] [--data-dir DIR] [--epochs 60]

Nodes that are near each other on walks get rows with large products, others small ones. Training the rows uses no
labels; a logistic regression then predicts the classes from the rows of a few labeled nodes. Without Planetoid's files,
Cora is synthetic. Expected: at least 0.9 of the other members of the karate club right, and far more of the papers than
the seventh that chance gives.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax
from sklearn.linear_model import LogisticRegression

import jmp_train as jt
from jmp_train import graphs
from jmp_train.data import neighbor_batches
from jmp_train.graphs.datasets import synthetic_cora

WIDTH, NEGATIVES = 32, 5
Split = tuple[np.ndarray, np.ndarray]  # the nodes for the probe, and those that it predicts


def read_graph(name: str, data_dir: Path | None) -> tuple[graphs.HostEdges, np.ndarray, Split]:
    """Returns edges in both directions, the class of each node, and the split."""
    if name == "karate":
        network = nx.karate_club_graph()
        labels = np.array([network.nodes[node]["club"] == "Officer" for node in network], np.int32)
        ends = np.array(network.to_directed().edges)
        members = np.random.default_rng(0).permutation(len(labels))
        return graphs.host_edges(ends[:, 0], ends[:, 1], len(labels)), labels, (members[:12], members[12:])
    data = synthetic_cora() if data_dir is None else graphs.read_planetoid(data_dir)
    return graphs.host_edges(data.senders, data.receivers, data.num_nodes), data.labels, (data.train, data.test)


def main(use_fp16: bool, graph: str, data_dir: Path | None, epochs: int) -> None:
    """Trains rows on walks, and prints the accuracy of the probe."""
    edges, labels, (train, test) = read_graph(graph, data_dir)
    count = edges.num_sources
    sampler = graphs.skip_gram_sampler(edges, batch_size=min(256, count), length=10, window=4, p=1.0, q=0.5)
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        centers, contexts = (jnp.maximum(ids, 0) for ids in (batch["pairs"].centers, batch["pairs"].contexts))
        _, others = graphs.uniform_negatives(batch["key"], centers, count, NEGATIVES)
        wanted = jnp.concatenate([contexts[:, None], others.reshape(-1, NEGATIVES)], axis=1)
        rows = graphs.gather(params["centers"], centers).astype(jnp.float32)
        logits = (rows[:, None] * graphs.gather(params["contexts"], wanted).astype(jnp.float32)).sum(-1)
        losses = optax.sigmoid_binary_cross_entropy(logits, jnp.zeros_like(logits).at[:, 0].set(1))
        return losses.sum(axis=1).mean(where=batch["pairs"].centers >= 0)

    key = jax.random.key(0)
    params = {"centers": jax.random.normal(key, (count, WIDTH)) / WIDTH**0.5, "contexts": jnp.zeros((count, WIDTH))}
    tx = jt.with_loss_scale(optax.adam(0.02), jt.torch_loss_scale(enabled=use_fp16))
    step = jax.jit(jt.train_step(jt.stateless(loss_fn), tx, policy=policy), donate_argnums=0)
    state, loss = jt.TrainState.create(params, tx), None
    for pairs in neighbor_batches(sampler, np.arange(count), lambda pairs: pairs, epochs=epochs):
        key, own = jax.random.split(key)
        state, metrics = step(state, {"pairs": pairs, "key": own})
        loss = metrics["loss"]
    rows = np.asarray(state.params["centers"], np.float64)
    probe = LogisticRegression(max_iter=1000).fit(rows[train], labels[train])
    print(f"loss {loss:.3f}  accuracy of the probe {probe.score(rows[test], labels[test]):.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--graph", choices=("karate", "cora"), default="karate")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--epochs", type=int, default=60)
    main(**vars(parser.parse_args()))
