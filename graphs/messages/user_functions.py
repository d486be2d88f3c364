"""User-defined functions: the views of edges, nodes and mailboxes that they take, and the checks of results."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.messages.frames import Frame, nodes_of
from jmp_train.graphs.structure import (
    EdgeType,
    Graph,
    Incidence,
    OurGraph,
    common_dtype,
    make_mailboxes,
    rows_like,
    upcast,
)
from jmp_train.policies.pytrees import has_tracers

Arrays = Mapping[str, jax.Array]


class Fields(Mapping[str, jax.Array]):
    """Features by name, which are read when they are asked for.

    Args:
      kind: their kind, for messages.
      features: arrays by name.
      read: returns a feature, given its name and array; the array itself by default.
    """

    def __init__(
        self,
        kind: str,
        features: Mapping[str, jax.Array],
        read: Callable[[str, jax.Array], jax.Array] = lambda _, feature: feature,
    ) -> None:
        self._kind, self._features, self._read = kind, features, read

    def __getitem__(self, name: str) -> jax.Array:
        if name not in self._features:
            known = ", ".join(map(repr, self._features)) or "none"
            raise KeyError(f"no {self._kind} {name!r}; there are: {known}")
        return self._read(name, self._features[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._features)

    def __len__(self) -> int:
        return len(self._features)


@dataclasses.dataclass(frozen=True)
class EdgeBatch:
    """The edges that a message function sees.

    Attributes:
      src: features [edges, ...] of the senders by name.
      dst: features [edges, ...] of the receivers by name.
      data: features [edges, ...] of the edges by name.
      senders: int32 [edges].
      receivers: int32 [edges].
      ids: int32 [edges], the edges' places in the graph.

    Example:
      >>> from jmp_train.graphs import apply_edges, from_edges
      >>> graph = from_edges([0, 1], [1, 1], 2)
      >>> apply_edges(graph, lambda edges: {"self_loop": edges.senders == edges.receivers}).edges["self_loop"]
      Array([False,  True], dtype=bool)
    """

    src: Mapping[str, jax.Array]
    dst: Mapping[str, jax.Array]
    data: Mapping[str, jax.Array]
    senders: jax.Array
    receivers: jax.Array
    ids: jax.Array

    def edges(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns senders, receivers and ids, each int32 [edges]."""
        return self.senders, self.receivers, self.ids

    def batch_size(self) -> int:
        """Returns the number of edges."""
        return self.ids.shape[0]

    def __len__(self) -> int:
        return self.batch_size()


@dataclasses.dataclass(frozen=True)
class NodeBatch:
    """The nodes that a reduce or apply function takes; with a mailbox, all of one in-degree.

    Attributes:
      data: features [nodes, ...] by name.
      mailbox: messages [nodes, degree, ...] by name, those of a node by ascending edge id.
      ids: int32 [nodes], the nodes' places in the graph.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges, update_all
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> last = lambda nodes: {"last": nodes.mailbox["m"][:, -1]}
      >>> update_all(graph, fn.copy_u("h", "m"), last).nodes["last"].tolist()
      [2.0, 0.0, 1.0]
    """

    data: Mapping[str, jax.Array]
    mailbox: Mapping[str, jax.Array]
    ids: jax.Array

    def nodes(self) -> jax.Array:
        """Returns the nodes' places in the graph, int32 [nodes]."""
        return self.ids

    def batch_size(self) -> int:
        """Returns the number of nodes."""
        return self.ids.shape[0]

    def __len__(self) -> int:
        return self.batch_size()


EdgeFunction = Callable[[EdgeBatch], Mapping[str, jax.Array]]
NodeFunction = Callable[[NodeBatch], Mapping[str, jax.Array]]


def call_message_function(function: EdgeFunction, frame: Frame, ids: jax.Array | None) -> dict[str, jax.Array]:
    """Returns the checked results of a message function, [edges, ...] by name.

    Args:
      function: a function of the edges.
      frame: the edges with their features.
      ids: int [edges], the places of these edges in the graph; None if they are all.
    """
    senders, receivers = frame.adjacency.senders, frame.adjacency.receivers
    count = receivers.num_edges
    batch = EdgeBatch(
        Fields("sender feature", frame.src, functools.partial(_of_edges, senders)),
        Fields("receiver feature", frame.dst, functools.partial(_of_edges, receivers)),
        Fields("edge feature", frame.data),
        senders.ids,
        receivers.ids,
        jnp.arange(count, dtype=jnp.int32) if ids is None else ids,
    )
    return _checked_results("message", function(batch), count)


def _of_edges(end: Incidence, name: str, feature: jax.Array) -> jax.Array:
    """Returns a feature's rows [edges, ...] at one end of edges, with gradients that are added in float32."""
    del name
    return end.read(upcast(feature)).astype(feature.dtype)


def call_reduce_function(
    function: NodeFunction, frame: Frame, messages: Mapping[str, jax.Array]
) -> dict[str, jax.Array]:
    """Returns the checked results of a reduce function, [receivers, ...] by name.

    Args:
      function: a function of the nodes of one in-degree with their messages.
      frame: the edges with the receivers' features.
      messages: arrays [edges, ...] by name.

    Raises:
      TypeError: the graph has no mailboxes, and in-degrees are not known under jit.
    """
    receivers, mailboxes = frame.adjacency.receivers, frame.adjacency.mailboxes
    count = receivers.num_segments
    if mailboxes is None:
        if has_tracers(receivers.ids):
            raise TypeError(
                "a user-defined reduction groups nodes by in-degree, which is not known under jit: make the "
                'graph with formats=("mailbox",), or reduce outside of jit. Blocks, and graphs with dropped edges, '
                "have no mailboxes: use a built-in reduction"
            )
        mailboxes = make_mailboxes(np.asarray(receivers.ids), count)
    results: dict[str, jax.Array] = {}
    for box in mailboxes:
        data = {name: feature[box.nodes] for name, feature in frame.dst.items()}
        mailbox = {name: message[box.edges] for name, message in messages.items()}
        batch = NodeBatch(Fields("node feature", data), Fields("message", mailbox), box.nodes)
        for name, rows in _checked_results("reduce", function(batch), batch.batch_size()).items():
            start = results.get(name, jnp.zeros((count, *rows.shape[1:]), rows.dtype))
            results[name] = start.at[box.nodes].set(rows)
    return results


def call_node_function(
    function: NodeFunction,
    features: Mapping[str, jax.Array],
    count: int,
    ids: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Returns the checked results of a function of nodes without messages, [nodes, ...] by name.

    Args:
      function: a function of the nodes.
      features: arrays [nodes, ...] by name.
      count: number of nodes.
      ids: int [nodes], the places of these nodes in the graph; None if they are all.
    """
    ids = jnp.arange(count) if ids is None else ids
    return _checked_results(
        "node", function(NodeBatch(Fields("node feature", features), Fields("message", {}), ids)), count
    )


def _checked_results(name: str, results: object, rows: int) -> dict[str, jax.Array]:
    """Returns the results of a user-defined function as checked arrays.

    Args:
      name: name of the function, for messages.
      results: the results to check, arrays [rows, ...] by name.
      rows: the required number of rows.

    Raises:
      TypeError: the result is not a dictionary.
      ValueError: an array has another number of rows.
    """
    if not isinstance(results, Mapping):
        kind = type(results).__name__
        raise TypeError(f"the {name} function must return a dictionary of arrays, got {kind}")
    arrays = {key: jnp.asarray(value) for key, value in results.items()}
    for key, array in arrays.items():
        if array.ndim == 0 or array.shape[0] != rows:
            raise ValueError(f"the {name} function's {key!r} must have {rows} rows, got shape {array.shape}")
    return arrays


def with_node_features(
    graph: OurGraph, ntype: str | None, features: Arrays, apply: NodeFunction | None = None
) -> OurGraph:
    """Returns the graph with features of its nodes.

    Args:
      graph: a graph.
      ntype: the node type; None if there is only one.
      features: arrays [nodes, ...] by name.
      apply: a function of all these nodes, called with the new features, to further ones.
    """
    if isinstance(graph, Graph):
        graph = graph.with_nodes(**features)
    else:
        assert ntype is not None
        graph = graph.with_nodes(ntype, **features)
    if apply is None:
        return graph
    nodes = nodes_of(graph, ntype)
    return with_node_features(graph, ntype, call_node_function(apply, nodes.features, nodes.num_nodes))


def with_edge_features(graph: OurGraph, etype: str | EdgeType | None, features: Arrays) -> OurGraph:
    """Returns the graph with features of its edges.

    Args:
      graph: a graph.
      etype: the edge type; None if there is only one.
      features: arrays [edges, ...] by name.
    """
    if isinstance(graph, Graph):
        return graph.with_edges(**features)
    return graph.with_edges(graph.edge_type(etype), **features)


def merged(old: Arrays, new: Arrays, is_written: jax.Array) -> dict[str, jax.Array]:
    """Returns new features in the rows of a mask, and in the others the old ones, or 0 for a new name.

    Where the dtypes differ, the result has one that holds both.
    """
    results = {}
    for name, array in new.items():
        start = _start(old, name, array, len(is_written))
        results[name] = jnp.where(rows_like(is_written, array), array.astype(start.dtype), start)
    return results


def placed(old: Arrays, new: Arrays, ids: jax.Array, count: int) -> dict[str, jax.Array]:
    """Returns new features in the rows `ids`, and in the others the old ones, or 0 for a new name.

    Where the dtypes differ, the result has one that holds both.
    """
    results = {}
    for name, array in new.items():
        start = _start(old, name, array, count)
        results[name] = start.at[ids].set(array.astype(start.dtype))
    return results


def _start(old: Arrays, name: str, new: jax.Array, count: int) -> jax.Array:
    """Returns the old feature in a dtype that holds it and the new one, or zeros."""
    shape = (count, *new.shape[1:])
    if name not in old:
        return jnp.zeros(shape, new.dtype)
    if old[name].shape != shape:
        raise ValueError(
            f"{name!r} has shape {old[name].shape}, but the new rows have shape {new.shape[1:]}: choose another name"
        )
    return old[name].astype(common_dtype(old[name].dtype, new.dtype))
