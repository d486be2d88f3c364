"""Which side each member of Zachary's karate club took: `jmp-train compare examples/tasks/karate.py --model gat`.

Two of the 34 members, the instructor and the president, are labeled; the others are for evaluation. The
graph comes with networkx, so this job runs anywhere. A batch is the labeled members; all batches share the graph
and its features, a one-hot vector for each member.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
from flax import nnx
from models import GAT, GCN, Accuracy, cross_entropy, node_classifier
from task_options import Arrays

import jmp_train as jt
from jmp_train.graphs.structure import Graph, from_edges

CLASSES = 2
LEARNING_RATE = 0.02
LABELED = (0, 33)  # the instructor and the president


@dataclasses.dataclass(frozen=True)
class Options:
    """Options of the job.

    Args:
      model: the model.
    """

    model: Literal["gcn", "gat"] = "gcn"


def task(options: Options) -> jt.Task:
    """Returns the task with the model of `options.model`, "gcn" or "gat"."""
    graph, labels = read_club()
    members = np.arange(graph.num_nodes, dtype=np.int32)
    is_labeled = np.isin(members, LABELED)
    features = np.eye(graph.num_nodes, dtype=np.float32)

    def make(key: jax.Array) -> GCN | GAT:
        rngs = nnx.Rngs(key)
        if options.model == "gat":
            return GAT(graph.num_nodes, 8, CLASSES, (4, 1), rngs=rngs)
        return GCN(graph.num_nodes, 16, CLASSES, rngs=rngs)

    init, predict_on, _ = node_classifier(make)

    def predict(params: Any, model_state: Any, batch: Arrays, rng: jax.Array | None = None) -> jax.Array:
        del rng
        # A policy casts the parameters. The features are not part of the batch, so they are cast here.
        of_all = {"graph": graph, "features": jnp.asarray(features, jax.tree.leaves(params)[0].dtype)}
        return predict_on(params, model_state, {**batch, **of_all})

    return jt.Task(
        train=_examples(members, labels, is_labeled),
        test=_examples(members, labels, ~is_labeled),
        init=init,
        loss_fn=cross_entropy(predict),
        metrics=Accuracy(predict),
        learning_rate=LEARNING_RATE,
        optimizer=optax.adam(optax.constant_schedule(LEARNING_RATE)),
        epochs=50,
    )


def read_club() -> tuple[Graph, np.ndarray]:
    """Returns the graph with self-loops and each friendship in both directions, and the clubs of the members.

    Returns:
      The graph of 34 nodes and 190 edges; and int32 [34], 0 with the instructor, 1 with the president.
    """
    club = networkx.karate_club_graph()
    one_way = np.array(club.edges)
    self_loops = np.arange(len(club))
    senders = np.concatenate([one_way[:, 0], one_way[:, 1], self_loops])
    receivers = np.concatenate([one_way[:, 1], one_way[:, 0], self_loops])
    labels = [data["club"] != "Mr. Hi" for _, data in club.nodes(data=True)]
    return from_edges(senders, receivers, len(club)), np.array(labels, np.int32)


def _examples(members: np.ndarray, labels: np.ndarray, chosen: np.ndarray) -> Arrays:
    return {"node": members[chosen], "label": labels[chosen]}
