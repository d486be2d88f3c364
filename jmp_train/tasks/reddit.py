"""Task `reddit`: the graph attention network of DGL's guide to mixed precision, on Reddit's posts.

Three layers, hidden 256 in each head, on the whole graph at once: a step is an epoch. A batch is the
labelled nodes; the graph and its features are shared by all of them, as arguments of the step, since as
constants they would be part of the program.
"""

import jax
import numpy as np
import optax
from flax import nnx

from jmp_train.graphs.graph import Graph, from_edges
from jmp_train.graphs.node_data import NodeData
from jmp_train.graphs.reddit_files import (
    CLASSES,
    DATA_FILE,
    FEATURES,
    GRAPH_FILES,
    PUBLIC,
    read_reddit,
    sorted_ends,
)
from jmp_train.synthetic_reddit import synthetic_reddit
from jmp_train.tasks.graph_models import GAT, adam_with_l2, node_classifier, rows
from jmp_train.tasks.task import Task, TaskOptions

HIDDEN = 256
HEADS = (1, 1, 1)


def load(options: TaskOptions) -> Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic data; nothing on a device."""
    heads = _checked_heads(options.heads)
    data = _data(options)
    train, test = (rows(data, ids) for ids in (data.train, data.test))

    def make(key: jax.Array) -> GAT:
        return GAT(FEATURES, HIDDEN, CLASSES, heads, rngs=nnx.Rngs(key))

    init, predict, loss_fn = node_classifier(make)
    return Task(
        name="reddit",
        train=train,
        test=test,
        prepare=lambda rows: rows,
        init=init,
        loss_fn=loss_fn,
        predict=predict,
        schedule=lambda steps: optax.constant_schedule(1e-3),
        optimizer=adam_with_l2,
        batch_size=options.train_size or len(data.train),
        epochs=100,
        shared=lambda: {"graph": make_graph(data), "features": data.features},
    )


def make_graph(data: NodeData) -> Graph:
    """Returns the graph with one loop at each node; of its edges, only what streaming needs is kept.

    Args:
      data: the edges, with or without loops.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs.node_data import NodeData
      >>> ends, none = np.array([[0, 1, 1], [1, 0, 1]], np.int32), np.zeros(2, np.int32)
      >>> graph = make_graph(NodeData(ends[0], ends[1], none, none, 1, none, none, none))
      >>> graph.num_edges, graph.in_degrees.tolist()
      (4, [2, 2])
    """
    n_node = data.num_nodes
    is_loop = data.senders == data.receivers
    keys = data.receivers[~is_loop].astype(np.int64)
    keys *= n_node
    keys += data.senders[~is_loop]
    loops = np.arange(n_node, dtype=np.int64) * (n_node + 1)
    senders, receivers = sorted_ends(np.concatenate([keys, loops]), n_node)
    return from_edges(senders, receivers, n_node, formats=("csr",))


def _data(options: TaskOptions) -> NodeData:
    if options.synthetic:
        return synthetic_reddit(1.0 if options.scale is None else options.scale)
    if options.scale is not None:
        raise ValueError(f"scale={options.scale}: the real graph has one size; add --synthetic")
    if options.data_dir is None:
        raise FileNotFoundError(
            f"task reddit wants --data-dir, the folder of {GRAPH_FILES[0]} and {DATA_FILE} "
            f"(or --synthetic); {PUBLIC}"
        )
    return read_reddit(options.data_dir)


def _checked_heads(heads: tuple[int, ...] | None) -> tuple[int, ...]:
    if heads is None:
        return HEADS
    if len(heads) != len(HEADS) or any(count < 1 for count in heads):
        raise ValueError(f"heads={heads} must be {len(HEADS)} numbers of at least 1, one a layer")
    return heads
