"""Task `proteins`: classification of small graphs, TU Dortmund's PROTEINS or made ones of its structure, by a GIN.

Any data set of graphs with classes in TU's files can be in `--data-dir`. A tenth of the graphs of each class is for
evaluation. A batch of graphs is padded to the size of the largest that there may be, so that there is one program.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from jmp_train.graphs.datasets import (
    TU_ADDRESS,
    GraphData,
    PaddedSize,
    padded_batch,
    padded_sizes,
    read_tu,
    synthetic_proteins,
)
from jmp_train.graphs.structure import stack
from jmp_train.policies.amp_modes import batch_norm_paths
from jmp_train.tasks.models import GIN, graph_classifier
from jmp_train.tasks.options import TaskOptions
from jmp_train.tasks.task import Arrays, Task

HIDDEN, LAYERS = 32, 3
MOST_DEGREES = 64


def load(options: TaskOptions) -> Task:
    """Returns the task with the data of `options.data_dir`, or with made graphs; nothing on a device."""
    if options.synthetic:
        return make_task(synthetic_proteins(), options)
    folder = options.folder("the folder of PROTEINS_A.txt and the other files of a data set", f"; see {TU_ADDRESS}")
    return make_task(read_tu(folder), options)


def make_task(data: GraphData, options: TaskOptions | None = None, epochs: int = 30) -> Task:
    """Returns the task of training a GIN on the graphs of a data set.

    Args:
      data: the graphs, with classes.
      options: over how many devices and parts a batch is spread.
      epochs: passes over the training graphs.

    Raises:
      ValueError: the graphs have no classes.

    Example:
      >>> task = make_task(synthetic_proteins(40))
      >>> len(task.train["graph"]), len(task.test["graph"])
      (36, 4)
    """
    if data.num_classes is None:
        raise ValueError("the labels of the graphs are numbers, and not classes")
    options = TaskOptions() if options is None else options
    data = dataclasses.replace(data, nodes={"h": node_features(data)}, edges={}, graphs={})
    width, classes = data.nodes["h"].shape[1], int(data.labels.max()) + 1

    def make(key: jax.Array, axis_name: str | None) -> GIN:
        return GIN(width, HIDDEN, classes, layers=LAYERS, axis_name=axis_name, rngs=nnx.Rngs(key))

    @functools.cache
    def size(count: int) -> PaddedSize:
        return padded_sizes(data, count, buckets=1)[0]

    def prepare(examples: Arrays) -> dict[str, Any]:
        parts = np.split(examples["graph"], options.devices * options.accumulate_steps)
        found = [padded_batch(data, part, size(len(part))) for part in parts]
        return {"graph": found[0] if len(found) == 1 else stack(found), "label": examples["label"]}

    init, predict, loss_fn = graph_classifier(make, options.axis_name)
    train, test = ({"graph": places, "label": data.labels[places]} for places in split_by_class(data.labels))
    return Task(
        train=train,
        test=test,
        prepare=prepare,
        init=init,
        loss_fn=loss_fn,
        predict=predict,
        schedule=lambda steps: optax.cosine_decay_schedule(0.01, steps),
        optimizer=optax.adam,
        batch_size=32,
        epochs=epochs,
        batch_norms=lambda: batch_norm_paths(nnx.eval_shape(lambda: make(jax.random.key(0), None))),
    )


def node_features(data: GraphData) -> np.ndarray:
    """Returns float32 [nodes, width]: labels of nodes as one-hot vectors, and attributes; else degrees as such vectors.

    Attributes are scaled to a mean of 0 and a variance of 1.

    Args:
      data: the graphs.

    Example:
      >>> node_features(synthetic_proteins(3)).shape[1]
      3
    """
    found = []
    if "label" in data.nodes:
        labels = data.nodes["label"].reshape(len(data.nodes["label"]), -1)
        found += [np.eye(labels[:, i].max(initial=0) + 1)[labels[:, i]] for i in range(labels.shape[1])]
    if "attr" in data.nodes:
        attributes = data.nodes["attr"].astype(np.float64)
        spread = attributes.std(0)
        found.append((attributes - attributes.mean(0)) / np.where(spread > 0, spread, 1))
    if not found:
        firsts = np.repeat(data.node_starts[:-1], data.n_edge)
        degrees = np.bincount(data.receivers + firsts, minlength=int(data.n_node.sum()))
        found.append(np.eye(MOST_DEGREES)[np.minimum(degrees, MOST_DEGREES - 1)])
    return np.concatenate(found, axis=1).astype(np.float32)


def split_by_class(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the graphs to train on and a tenth of each class to test on, int32, in an order by chance.

    Args:
      labels: int [graphs].

    Example:
      >>> train, test = split_by_class(np.array([0] * 30 + [1] * 10))
      >>> len(train), (test < 30).sum(), (test >= 30).sum()
      (36, np.int64(3), np.int64(1))
    """
    random = np.random.default_rng(0)
    order = random.permutation(len(labels)).astype(np.int32)
    of_class = [order[labels[order] == one] for one in np.unique(labels)]
    test = np.concatenate([places[: round(len(places) / 10)] for places in of_class])
    return order[~np.isin(order, test)], test
