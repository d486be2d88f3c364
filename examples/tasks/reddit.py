"""DGL's graph attention network on Reddit's posts: `jmp-train train examples/tasks/reddit.py --synthetic --scale 0.01`.

Three layers, hidden 256 in each head, on the whole graph at once: a step is an epoch. A batch is the
labeled nodes. All batches share the graph and its features, which are arguments of the step; as
constants they would be part of the program. With several devices, each has its part of the graph.
"""

import dataclasses

import jax
import numpy as np
import optax
from flax import nnx
from models import GAT, Accuracy, adam_with_l2, node_classifier, node_examples, over_devices
from task_options import FileOptions

import jmp_train as jt
from jmp_train.graphs import NodeData, read_reddit
from jmp_train.graphs.datasets import (
    REDDIT_CLASSES,
    REDDIT_DATA_FILE,
    REDDIT_FEATURES,
    REDDIT_GRAPH_FILES,
    REDDIT_SOURCE,
    sorted_ends,
    synthetic_reddit,
)
from jmp_train.graphs.sampling import HostEdges, host_edges
from jmp_train.graphs.structure import Graph, from_edges

HIDDEN = 256
LEARNING_RATE = 1e-3
HEADS = (1, 1, 1)
FORMATS = ("csr",)  # the only edge format that chunked attention needs


@dataclasses.dataclass(frozen=True)
class Options(FileOptions):
    """Options of the job.

    Args:
      heads: the attention heads of each layer; default: 1 1 1.
      scale: with --synthetic, the fraction of Reddit's nodes and edges, above 0 and up to 1; default: 1.
      devices: number of parts into which the graph is split, one per device.
    """

    heads: tuple[int, int, int] | None = None
    scale: float | None = None
    devices: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale is not None and not 0 < self.scale <= 1:
            raise ValueError(f"scale={self.scale} must be above 0 and up to 1")
        if self.heads is not None and (len(self.heads) != len(HEADS) or min(self.heads) < 1):
            raise ValueError(f"heads={self.heads} must be {len(HEADS)} numbers of at least 1, one per layer")


def task(options: Options) -> jt.Task:
    """Returns the task with the data of `options.data_dir`, or with synthetic data; moves nothing to a device."""
    data = _data(options)
    train, test = (node_examples(data, ids) for ids in (data.train, data.test))

    def make(key: jax.Array) -> GAT:
        return GAT(REDDIT_FEATURES, HIDDEN, REDDIT_CLASSES, options.heads or HEADS, rngs=nnx.Rngs(key))

    init, predict, loss_fn = node_classifier(make)
    whole = jt.Task(
        train=train,
        test=test,
        init=init,
        loss_fn=loss_fn,
        metrics=Accuracy(predict),
        learning_rate=LEARNING_RATE,
        optimizer=adam_with_l2(optax.constant_schedule(LEARNING_RATE)),
        epochs=100,
        shared=lambda: {"graph": make_graph(data), "features": data.features},
    )

    def edges() -> HostEdges:  # in the host's memory, because a device may be too small for them
        return host_edges(*_ends_with_self_loops(data), data.num_nodes)

    return over_devices(whole, edges, lambda: data.features, options.devices, FORMATS)


def make_graph(data: NodeData) -> Graph:
    """Returns the graph with one self-loop at each node, and only the edge format that chunked attention needs.

    Args:
      data: the edges, with or without self-loops.

    Example:
      >>> import numpy as np
      >>> from jmp_train.graphs import NodeData
      >>> ends, none = np.array([[0, 1, 1], [1, 0, 1]], np.int32), np.zeros(2, np.int32)
      >>> graph = make_graph(NodeData(ends[0], ends[1], none, none, 1, none, none, none))
      >>> graph.num_edges, graph.in_degrees.tolist()
      (4, [2, 2])
    """
    return from_edges(*_ends_with_self_loops(data), data.num_nodes, formats=FORMATS)


def _ends_with_self_loops(data: NodeData) -> tuple[np.ndarray, np.ndarray]:
    n_node = data.num_nodes
    is_self_loop = data.senders == data.receivers
    keys = data.receivers[~is_self_loop].astype(np.int64)
    keys *= n_node
    keys += data.senders[~is_self_loop]
    self_loops = np.arange(n_node, dtype=np.int64) * (n_node + 1)
    return sorted_ends(np.concatenate([keys, self_loops]), n_node)


def _data(options: Options) -> NodeData:
    if options.synthetic:
        return synthetic_reddit(1.0 if options.scale is None else options.scale)
    if options.scale is not None:
        raise ValueError(f"scale={options.scale}: only synthetic data can be scaled; add --synthetic")
    files = f"the folder of {REDDIT_GRAPH_FILES[0]} and {REDDIT_DATA_FILE}"
    return read_reddit(options.folder(files, f"; {REDDIT_SOURCE}"))
