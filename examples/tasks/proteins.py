"""A GIN classifies small graphs, such as PROTEINS: `jmp-train train examples/tasks/proteins.py --synthetic`.

`--data-dir` can hold any data set of graphs with classes in TU's files, or in OGB's, such as ogbg-molhiv. OGB's split
is kept; otherwise a tenth of the graphs of each class is for evaluation. A batch of graphs is padded to the first of
three sizes that holds it; the largest holds any. There is a program for each size, and most batches have the first.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from models import GIN, Accuracy, graph_classifier
from task_options import Arrays, ShardedFileOptions

import jmp_train as jt
from jmp_train.graphs import (
    GraphData,
    PaddedSize,
    padded_batch,
    padded_sizes,
    read_ogb_graphs,
    read_tu,
    synthetic_proteins,
)
from jmp_train.graphs.datasets import TU_ADDRESS, first_that_holds
from jmp_train.graphs.structure import stack

HIDDEN, LAYERS = 32, 3
MOST_DEGREES = 64
SIZES = 3
MOST_CATEGORIES = 256  # of an integer feature; one with more is used as a number


@dataclasses.dataclass(frozen=True)
class Options(ShardedFileOptions):
    """Options of the job.

    Args:
      accumulate_steps: number of parts into which a device's batch is split.
    """

    accumulate_steps: int = 1


def task(options: Options) -> jt.Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic graphs; moves nothing to a device."""
    if options.synthetic:
        return make_task(synthetic_proteins(), options)
    files = "the folder of PROTEINS_A.txt and the other files of a data set"
    folder = options.folder(files, f"; see {TU_ADDRESS}")
    is_ogb = (folder / "raw").is_dir()
    return make_task(read_ogb_graphs(folder, add_inverse_edge=True) if is_ogb else read_tu(folder), options)


def make_task(data: GraphData, options: Options | None = None, epochs: int = 30) -> jt.Task:
    """Returns the task of training a GIN on the graphs of a data set.

    Args:
      data: the graphs, with classes.
      options: the devices and parts over which a batch is split.
      epochs: passes over the training graphs.

    Raises:
      ValueError: the graphs have no classes.

    Example:
      >>> task = make_task(synthetic_proteins(40))
      >>> len(task.train["graph"]), len(task.test["graph"])
      (36, 4)
    """
    if data.num_classes is None:
        raise ValueError("the labels of the graphs must be classes, got numbers")
    options = Options() if options is None else options
    data = dataclasses.replace(data, nodes={"h": node_features(data)}, edges={}, graphs={})
    width, classes = data.nodes["h"].shape[1], int(data.labels.max()) + 1

    def make(key: jax.Array, axis: str | None) -> GIN:
        return GIN(width, HIDDEN, classes, layers=LAYERS, axis_name=axis, rngs=nnx.Rngs(key))

    @functools.cache
    def sizes(count: int) -> tuple[PaddedSize, ...]:
        return padded_sizes(data, count, buckets=SIZES)

    def prepare(examples: Arrays) -> dict[str, Any]:
        graphs = examples["graph"]
        count = options.devices * options.accumulate_steps
        parts = [graphs] if len(graphs) % count else np.split(graphs, count)  # the last test batch is one part
        size = first_that_holds(data, sizes(len(parts[0])), parts)
        found = [padded_batch(data, part, size) for part in parts]
        return {"graph": found[0] if len(found) == 1 else stack(found), "label": examples["label"]}

    init, predict, loss_fn = graph_classifier(make, options.axis_name)
    split = (data.train, data.test) if len(data.train) else split_by_class(data.labels)
    train, test = ({"graph": places, "label": data.labels[places]} for places in split)
    rate = functools.partial(optax.cosine_decay_schedule, 0.01)
    return jt.Task(
        train=train,
        test=test,
        prepare=prepare,
        init=init,
        loss_fn=loss_fn,
        metrics=Accuracy(predict),
        learning_rate=rate,
        optimizer=lambda steps: optax.adam(rate(steps)),
        batch_size=32,
        epochs=epochs,
        batch_norms=lambda: jt.policies.batch_norm_paths(nnx.eval_shape(lambda: make(jax.random.key(0), None))),
    )


def node_features(data: GraphData) -> np.ndarray:
    """Returns float32 [nodes, width]: one-hot node labels and the attributes; without either, one-hot degrees.

    Attributes are scaled to mean 0 and variance 1. Integer features are labels, others are attributes.

    Args:
      data: the graphs.

    Example:
      >>> node_features(synthetic_proteins(3)).shape[1]
      3
    """
    known = [rows.reshape(len(rows), -1).T for rows in data.nodes.values()]
    found = [_one_hot(row) if _is_label(row) else _scaled(row) for rows in known for row in rows]
    if not found:
        firsts = np.repeat(data.node_starts[:-1], data.n_edge)
        degrees = np.bincount(data.receivers + firsts, minlength=int(data.n_node.sum()))
        found.append(np.eye(MOST_DEGREES)[np.minimum(degrees, MOST_DEGREES - 1)])
    return np.concatenate(found, axis=1).astype(np.float32)


def _is_label(row: np.ndarray) -> bool:
    return bool(np.issubdtype(row.dtype, np.integer)) and len(np.unique(row)) <= MOST_CATEGORIES


def _one_hot(labels: np.ndarray) -> np.ndarray:
    """Returns one-hot vectors with a column for each label that occurs."""
    known, places = np.unique(labels, return_inverse=True)
    return np.eye(len(known))[places]


def _scaled(row: np.ndarray) -> np.ndarray:
    numbers = row.astype(np.float64)[:, None]
    return (numbers - numbers.mean()) / (numbers.std() or 1)


def split_by_class(labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the graphs to train on and a tenth of each class to test on, int32, in random order.

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
