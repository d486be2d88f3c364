"""PNA predicts from its edges how a network was generated, in float16.

    python examples/pna_networks.py [--no-use-fp16] [--count 480] [--epochs 12]

Networks of 16 to 32 nodes are rings with a fifth of the edges rewired, random, or grown by preferential attachment. All
have the same number of edges, and nodes have no features. Expected: more than 90% of the test networks right; chance
level is 33%.
"""

import argparse
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jmp_train as jt
from jmp_train import graphs

BATCH, MOST = 32, 32


def make_network(kind: int, random: np.random.Generator) -> graphs.Graph:
    """Returns a network of two edges per node, each in both directions: 0 a ring, 1 random, 2 grown."""
    count = int(random.integers(16, MOST + 1))
    own = np.repeat(np.arange(count), 2)
    others = random.integers(0, count, 2 * count)
    if kind == 0:
        is_rewired = random.random(2 * count) < 0.2
        others = np.where(is_rewired, others, (own + np.tile([1, 2], count)) % count)
    if kind == 2:
        ends = [0]  # a node for each edge that it has
        for node in range(count):
            others[2 * node : 2 * node + 2] = random.choice(ends, 2)
            ends += [node, node, *others[2 * node : 2 * node + 2]]
    return graphs.from_edges(np.append(own, others), np.append(others, own), count, formats=("coo",))


def make_batches(networks: Sequence[graphs.Graph], label: np.ndarray) -> list[dict[str, Any]]:
    """Returns batches of one size, padded."""
    batches = []
    for first in range(0, len(networks) - BATCH + 1, BATCH):
        whole = graphs.batch(networks[first : first + BATCH])
        padded = graphs.pad(whole, BATCH * MOST + 1, BATCH * MOST * 4, n_graph=BATCH + 1)
        batches.append({"graph": padded, "label": np.append(label[first : first + BATCH], 0)})
    return batches


class PNA(nnx.Module):
    """The model, without any code for precision."""

    def __init__(self, delta: float, classes: int, rngs: nnx.Rngs) -> None:
        widths = (1, 16, 16)
        self.layers = nnx.List([graphs.PNAConv(width, 16, delta=delta, rngs=rngs) for width in widths])
        self.out = nnx.Linear(32, classes, rngs=rngs)

    def __call__(self, graph: graphs.Graph, dtype: Any) -> jax.Array:
        """Returns logits [graphs, classes]."""
        h = jnp.ones((graph.num_nodes, 1), dtype)
        for layer in self.layers:
            h = nnx.relu(layer(graph, h))
        return self.out(jnp.concatenate([graphs.mean_nodes(graph, h), graphs.max_nodes(graph, h)], 1))


def main(use_fp16: bool, count: int, epochs: int) -> None:
    """Trains on three quarters of the networks, and prints losses and the accuracy on the others."""
    random = np.random.default_rng(0)
    label = random.integers(0, 3, count).astype(np.int32)
    networks = [make_network(kind, random) for kind in label]
    batches = make_batches(networks, label)
    test, train = batches[: len(batches) // 4], batches[len(batches) // 4 :]
    delta = float(np.log1p(np.concatenate([network.in_degrees for network in networks[len(test) * BATCH :]])).mean())
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    structure, params = nnx.split(PNA(delta, 3, nnx.Rngs(0)))

    def logits_of(params: Any, graph: graphs.Graph) -> jax.Array:
        dtype = jax.tree.leaves(params)[0].dtype  # a policy has cast the parameters, and features follow
        return nnx.merge(structure, params)(graph, dtype).astype(jnp.float32)

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(logits_of(params, batch["graph"]), batch["label"])
        return losses.mean(where=graphs.graph_mask(batch["graph"]))

    rate = optax.cosine_decay_schedule(5e-3, epochs * len(train))
    tx = jt.with_loss_scale(optax.adam(rate), jt.torch_loss_scale(enabled=use_fp16))
    train_step, traces = jt.train_step(jt.stateless(loss_fn), tx, policy=policy), []

    def step(state: jt.TrainState, batch: Any) -> tuple[jt.TrainState, Any]:
        traces.append(batch)  # once for each trace
        return train_step(state, batch)

    step = jax.jit(step, donate_argnums=0)
    state = jt.TrainState.create(params, tx)
    for epoch in range(1, epochs + 1):
        losses = []
        for place in random.permutation(len(train)):
            state, metrics = step(state, train[place])
            losses.append(metrics["loss"])
        print(f"epoch {epoch}  loss {np.mean(losses):.4f}")
    print(f"{len(traces)} trace")
    predict = jax.jit(lambda params, graph: logits_of(params, graph).argmax(1))
    right = []
    for batch in test:
        found = predict(policy.cast_to_compute(state.params), batch["graph"])
        right.append((found == batch["label"])[graphs.graph_mask(batch["graph"])])
    print(f"test accuracy {np.concatenate(right).mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--count", type=int, default=480)
    parser.add_argument("--epochs", type=int, default=12)
    main(**vars(parser.parse_args()))
