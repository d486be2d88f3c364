"""Entity classification by a relational GCN (RGCN), in float16, where the meaning of an edge depends on its type.

    python examples/rgcn_entities.py [--no-use-fp16] [--entities 2000] [--epochs 40]

The data are synthetic: a relation of type r leads from an entity of class c to one of class c + r, modulo the number of
classes; four tenths of the edges are random. The class of half of the entities is an input. The others are classified
by their relations to these: without the types, all classes look alike. Each relation has a reverse with its own type,
as in the paper. Expected: more than 85% of the test entities right; chance level is 20%.

Reference: Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks,
https://arxiv.org/abs/1703.06103
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

CLASSES = RELATIONS = 5
DRAWN = 0.4  # the fraction of the edges that carry no information


class RGCN(nnx.Module):
    """The model, without any code for precision."""

    def __init__(self, hidden: int, rngs: nnx.Rngs) -> None:
        options: dict[str, Any] = {"regularizer": "basis", "num_bases": 5, "rngs": rngs}
        self.first = graphs.RelGraphConv(CLASSES, hidden, 2 * RELATIONS, activation=nnx.relu, **options)
        self.second = graphs.RelGraphConv(hidden, CLASSES, 2 * RELATIONS, **options)

    def __call__(self, graph: graphs.Graph, h: jax.Array) -> jax.Array:
        """Returns logits [entities, classes] of features [entities, classes], and of the edges' types and norms."""
        types, norm = graph.edges["type"], graph.edges["norm"]
        return self.second(graph, self.first(graph, h, types, norm), types, norm)


def made_entities(count: int) -> tuple[graphs.Graph, np.ndarray, np.ndarray]:
    """Returns a graph of entities with "hint", their class or zeros; their classes; and a mask of the hidden ones."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, count)
    senders, receivers = random.integers(0, count, (2, 6 * count))
    types = (labels[receivers] - labels[senders]) % RELATIONS
    is_drawn = random.random(len(types)) < DRAWN
    types = np.where(is_drawn, random.integers(0, RELATIONS, len(types)), types)
    is_hidden = random.random(count) < 0.5
    hint = np.eye(CLASSES, dtype=np.float32)[labels] * ~is_hidden[:, None]
    ends = np.append(senders, receivers), np.append(receivers, senders)
    types = np.append(types, types + RELATIONS)
    graph = graphs.from_edges(*ends, count, nodes={"hint": hint}, edges={"type": types})
    return graph.with_edges(norm=graphs.relation_norm(graph, types)), labels, is_hidden


def main(use_fp16: bool, entities: int, epochs: int) -> None:
    """Trains on half of the hidden entities, and prints the accuracy of the other half."""
    graph, labels, is_hidden = made_entities(entities)
    train, test = np.array_split(np.flatnonzero(is_hidden), 2)
    policy = jt.get_policy("mixed_float16" if use_fp16 else "float32")
    structure, params = nnx.split(RGCN(16, nnx.Rngs(0)))
    traces: list[Any] = []

    def loss_fn(params: Any, batch: Any) -> jax.Array:
        logits = nnx.merge(structure, params)(batch["graph"], batch["graph"].nodes["hint"])[train]
        return optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), batch["label"]).mean()

    tx = jt.with_loss_scale(optax.adam(1e-2), jt.torch_loss_scale(enabled=use_fp16))
    train_step = jt.train_step(jt.stateless(loss_fn), tx, policy=policy)

    def step(state: jt.TrainState, batch: Any) -> tuple[jt.TrainState, Any]:
        traces.append(batch)  # once for each trace
        return train_step(state, batch)

    step = jax.jit(step, donate_argnums=0)
    state = jt.TrainState.create(params, tx)
    batch = {"graph": policy.cast_to_compute(graph), "label": jnp.asarray(labels[train])}
    for epoch in range(1, epochs + 1):
        state, metrics = step(state, batch)
        if epoch % 10 == 0:
            print(f"loss {metrics['loss']:.4f}")
    print(f"{len(traces)} trace")

    @jax.jit
    def predict(params: Any, graph: graphs.Graph) -> jax.Array:
        return nnx.merge(structure, params)(graph, graph.nodes["hint"]).argmax(1)

    found = np.asarray(predict(policy.cast_to_compute(state.params), batch["graph"]))
    print(f"test accuracy {(found == labels)[test].mean():.2%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--use-fp16", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--entities", type=int, default=2000)
    parser.add_argument("--epochs", type=int, default=40)
    main(**vars(parser.parse_args()))
