"""The edges of one type with the features at their ends: taken out of a graph, run, and written back."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.connections import (
    Connections,
    connect_checked,
    connect_traced,
    is_traced,
    make_mailboxes,
)
from jmp_train.graphs.fn import BuiltIn, Message, Reduce
from jmp_train.graphs.graph import Graph
from jmp_train.graphs.hetero_graph import EdgeType, HeteroGraph
from jmp_train.graphs.messages import Frame, compute_messages, compute_reduction, reduce_messages
from jmp_train.graphs.segment import gather
from jmp_train.graphs.user_functions import (
    EdgeBatch,
    EdgeFunction,
    Fields,
    NodeFunction,
    checked_results,
    make_node_batch,
)

Arrays = dict[str, jax.Array]


def frame_of(graph: Graph | HeteroGraph, etype: str | EdgeType | None) -> Frame:
    """Returns the edges of one type with the features at their ends.

    Args:
      graph: a graph.
      etype: which edges; None where there is one type.

    Raises:
      ValueError: there is no such type, or there are several.
    """
    if isinstance(graph, Graph):
        if etype is not None:
            raise ValueError(
                f"etype={etype!r}, but the graph has one type of edges, without a name"
            )
        return Frame(graph.connections, graph.nodes, graph.nodes, graph.edges)
    kind = graph.edge_type(etype)
    source, _, target = kind
    return Frame(
        graph.connections[kind], graph.nodes[source], graph.nodes[target], graph.edges[kind]
    )


def target_type(graph: Graph | HeteroGraph, etype: str | EdgeType | None) -> str | None:
    """Returns the type of the nodes that edges enter; None where there is one only."""
    return None if isinstance(graph, Graph) else graph.edge_type(etype)[2]


def nodes_of(graph: Graph | HeteroGraph, ntype: str | None) -> tuple[Mapping[str, jax.Array], int]:
    """Returns the features of nodes, and how many there are.

    Args:
      graph: a graph.
      ntype: which nodes; None where there is one type.

    Raises:
      ValueError: there is no such type.
    """
    if isinstance(graph, Graph):
        if ntype is not None:
            raise ValueError(
                f"ntype={ntype!r}, but the graph has one type of nodes, without a name"
            )
        return graph.nodes, graph.num_nodes
    if ntype is None or ntype not in graph.nodes:
        known = ", ".join(map(repr, graph.nodes))
        raise ValueError(f"ntype={ntype!r} is not one of {known}")
    return graph.nodes[ntype], graph.num_nodes(ntype)


def some_edges(frame: Frame, edges: jax.Array) -> Frame:
    """Returns the frame of some edges only.

    Args:
      frame: the edges to choose from.
      edges: int [some edges], which.
    """
    ends = (frame.connections.sources, frame.connections.targets)
    ids = [end.ids[edges] for end in ends]
    data = {name: gather(feature, edges) for name, feature in frame.data.items()}
    senders, receivers = ids
    counts = (ends[0].num_segments, ends[1].num_segments)
    if is_traced(*ids):
        connections = connect_traced(senders, receivers, *counts)
    else:
        connections = connect_checked(np.asarray(senders), np.asarray(receivers), *counts)
    return Frame(connections, frame.src, frame.dst, data)


def where_edges(frame: Frame, is_kept: jax.Array) -> Frame:
    """Returns the frame in which only the edges of a mask, bool [edges], send."""
    connections = frame.connections
    targets = connections.targets.where(is_kept)
    return Frame(Connections((connections.sources, targets)), frame.src, frame.dst, frame.data)


def send(
    frame: Frame,
    message: Message | EdgeFunction,
    ids: jax.Array | None = None,
    implementation: str | None = None,
) -> Arrays:
    """Returns the messages [edges, ...] by name.

    Args:
      frame: the edges.
      message: built in or not.
      ids: int [edges], the places of these edges in the graph; None if they are all.
      implementation: see `chosen_implementation`.

    Raises:
      ValueError: a feature is missing, or shapes do not fit.
      TypeError: the function returns no dictionary of arrays.
    """
    if isinstance(message, Message):
        return {message.out: compute_messages(frame, message, implementation)}
    _check_function("message", message, 'fn.copy_u("h", "m")')
    connections = frame.connections
    count = connections.targets.num_edges
    batch = EdgeBatch(
        Fields("sender feature", frame.src, connections.sources),
        Fields("receiver feature", frame.dst, connections.targets),
        Fields("edge feature", frame.data),
        connections.sources.ids,
        connections.targets.ids,
        jnp.arange(count, dtype=jnp.int32) if ids is None else ids,
    )
    return checked_results("message", message(batch), count)


def receive(
    frame: Frame,
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    implementation: str | None = None,
) -> Arrays:
    """Returns what receivers make of their messages, [receivers, ...] by name.

    Args:
      frame: the edges.
      message: built in or not.
      reduce: built in or not.
      implementation: see `chosen_implementation`.

    Raises:
      ValueError: a feature or message is missing, or shapes do not fit.
      TypeError: a function returns no dictionary of arrays, or there are no mailboxes under jit.
    """
    if isinstance(message, Message) and isinstance(reduce, Reduce):
        return {reduce.out: compute_reduction(frame, message, reduce, implementation)}
    if not isinstance(reduce, Reduce):
        _check_function("reduce", reduce, 'fn.sum("m", "x")')
    messages = send(frame, message)
    if not isinstance(reduce, Reduce):
        return _reduce_by_function(frame, messages, reduce)
    if reduce.message not in messages:
        known = ", ".join(map(repr, messages))
        raise ValueError(
            f"{reduce.reduction} wants the message {reduce.message!r}; there are: {known}"
        )
    result = reduce_messages(frame.connections, messages[reduce.message], reduce.reduction)
    return {reduce.out: result}


def _check_function(name: str, function: Any, example: str) -> None:
    if not callable(function) or isinstance(function, BuiltIn):
        raise TypeError(
            f"{name} must be a function, or built in, such as {example}, got {function!r}"
        )


def _reduce_by_function(frame: Frame, messages: Arrays, function: NodeFunction) -> Arrays:
    connections = frame.connections
    count = connections.targets.num_segments
    mailboxes = connections.mailboxes
    if mailboxes is None:
        receivers = connections.targets.ids
        if is_traced(receivers):
            raise TypeError(
                "a user-defined reduction groups nodes by in-degree, which jit does not know: "
                'make the graph with formats=("mailbox",), or reduce outside of jit'
            )
        mailboxes = make_mailboxes(np.asarray(receivers), count)
    results: Arrays = {}
    for box in mailboxes:
        data = {name: feature[box.nodes] for name, feature in frame.dst.items()}
        mailbox = {name: message[box.edges] for name, message in messages.items()}
        batch = make_node_batch(data, box.nodes, mailbox)
        for name, rows in checked_results("reduce", function(batch), batch.batch_size()).items():
            start = results.get(name, jnp.zeros((count, *rows.shape[1:]), rows.dtype))
            results[name] = start.at[box.nodes].set(rows)
    return results
