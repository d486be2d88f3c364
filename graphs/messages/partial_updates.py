"""Message passing along some edges, or into or out of some nodes; other features stay."""

from collections.abc import Iterable

import jax
import jax.numpy as jnp

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.fn import Message
from jmp_train.graphs.messages.frames import (
    Edges,
    Frame,
    checked_ids,
    edge_ids,
    frame_of,
    nodes_of,
    some_edges,
    where_edges,
)
from jmp_train.graphs.messages.send_receive import Reduction, receive
from jmp_train.graphs.messages.user_functions import (
    EdgeFunction,
    NodeFunction,
    call_node_function,
    merged,
    with_node_features,
)
from jmp_train.graphs.structure import AnyGraph, EdgeType, OurGraph, accepts_jraph


@accepts_jraph
def send_and_recv(
    graph: OurGraph,
    edges: Edges,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> OurGraph:
    """Returns the graph after some edges have sent; only their receivers change.

    Args:
      graph: a graph of ours or jraph's.
      edges: int [some edges], or a pair of senders and receivers, all edges between which are meant.
      message: see `update_all`.
      reduce: see `update_all`; user-defined ones outside of jit only.
      apply: a function of `NodeBatch`, row by row, called with all nodes in the end; the rows of the
        receivers are taken.
      etype: the edge type; required if there are several.

    Returns:
      The graph; without edges, the same one.

    Raises:
      ValueError: see `update_all`; or an edge does not exist.
      TypeError: see `update_all`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> send_and_recv(graph, [1, 2], fn.copy_u("h", "m"), fn.sum("m", "h")).nodes["h"].tolist()
      [2.0, 1.0, 1.0]
    """
    frame = frame_of(graph, etype)
    ids = edge_ids(frame.adjacency, edges)
    if ids.shape[0] == 0:
        return graph
    return _sent(graph, some_edges(frame, ids), message, reduce, apply)


@accepts_jraph
def pull(
    graph: OurGraph,
    nodes: Ids,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> OurGraph:
    """Returns the graph after some nodes have reduced the messages of all edges that enter them.

    Args:
      graph: a graph of ours or jraph's.
      nodes: int [some nodes], which; only these change, those without messages too.
      message: see `update_all`.
      reduce: see `update_all`.
      apply: see `send_and_recv`.
      etype: the edge type; required if there are several.

    Returns:
      The graph; without nodes, the same one.

    Raises:
      ValueError: see `update_all`; or a node does not exist.
      TypeError: see `update_all`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> pull(graph, [0, 1], fn.copy_u("h", "m"), fn.sum("m", "h")).nodes["h"].tolist()
      [2.0, 0.0, 2.0]
    """
    frame = frame_of(graph, etype)
    count = frame.adjacency.receivers.num_segments
    ids = checked_ids("nodes", nodes, count)
    if ids.shape[0] == 0:
        return graph
    return _updated(graph, frame, receive(frame, message, reduce), _mask(ids, count), apply)


@accepts_jraph
def push(
    graph: OurGraph,
    nodes: Ids,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> OurGraph:
    """Returns the graph after some nodes have sent along all edges that leave them.

    Args:
      graph: a graph of ours or jraph's.
      nodes: int [some nodes], which send; only nodes that they reach change.
      message: see `update_all`.
      reduce: see `update_all`; user-defined ones outside of jit only.
      apply: see `send_and_recv`.
      etype: the edge type; required if there are several.

    Returns:
      The graph; without nodes, the same one.

    Raises:
      ValueError: see `update_all`; or a node does not exist.
      TypeError: see `update_all`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> push(graph, [2], fn.copy_u("h", "m"), fn.sum("m", "h")).nodes["h"].tolist()
      [2.0, 1.0, 2.0]
    """
    frame = frame_of(graph, etype)
    senders = frame.adjacency.senders
    ids = checked_ids("nodes", nodes, senders.num_segments)
    if ids.shape[0] == 0:
        return graph
    part = where_edges(frame, senders.read(_mask(ids, senders.num_segments)))
    return _sent(graph, part, message, reduce, apply)


def prop_nodes(
    graph: AnyGraph,
    frontiers: Iterable[Ids],
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> AnyGraph:
    """Returns the graph after frontiers of nodes have pulled, one after another.

    Args:
      graph: a graph of ours or jraph's.
      frontiers: for each step, the nodes that pull, int [some nodes].
      message: see `update_all`.
      reduce: see `update_all`.
      apply: see `send_and_recv`.
      etype: the edge type; required if there are several.

    Returns:
      The graph.

    Raises:
      ValueError: see `pull`.
      TypeError: see `pull`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1], [1, 2], 3, nodes={"h": jnp.array([1.0, 0.0, 0.0])})
      >>> prop_nodes(graph, [[1], [2]], fn.copy_u("h", "m"), fn.sum("m", "h")).nodes["h"].tolist()
      [1.0, 1.0, 1.0]
    """
    for nodes in frontiers:
        graph = pull(graph, nodes, message, reduce, apply, etype=etype)
    return graph


def prop_edges(
    graph: AnyGraph,
    frontiers: Iterable[Edges],
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> AnyGraph:
    """Returns the graph after frontiers of edges have sent, one after another.

    Args:
      graph: a graph of ours or jraph's.
      frontiers: for each step, the edges that send, as in `send_and_recv`.
      message: see `update_all`.
      reduce: see `send_and_recv`.
      apply: see `send_and_recv`.
      etype: the edge type; required if there are several.

    Returns:
      The graph.

    Raises:
      ValueError: see `send_and_recv`.
      TypeError: see `send_and_recv`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1], [1, 2], 3, nodes={"h": jnp.array([1.0, 0.0, 0.0])})
      >>> prop_edges(graph, [[0], [1]], fn.copy_u("h", "m"), fn.sum("m", "h")).nodes["h"].tolist()
      [1.0, 1.0, 1.0]
    """
    for edges in frontiers:
        graph = send_and_recv(graph, edges, message, reduce, apply, etype=etype)
    return graph


def _sent(
    graph: OurGraph,
    part: Frame,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None,
) -> OurGraph:
    """Returns the graph after some of its edges have sent, and those have received whom they reach."""
    is_reached = part.adjacency.receivers.degrees > 0
    return _updated(graph, part, receive(part, message, reduce), is_reached, apply)


def _updated(
    graph: OurGraph,
    frame: Frame,
    results: dict[str, jax.Array],
    is_written: jax.Array,
    apply: NodeFunction | None,
) -> OurGraph:
    """Returns the graph with results, and functions of them, in the rows of a mask."""
    old, count = nodes_of(graph, frame.receiver_type)
    new = merged(old, results, is_written)
    if apply is not None:
        seen = {**old, **new}
        new |= merged(seen, call_node_function(apply, seen, count), is_written)
    return with_node_features(graph, frame.receiver_type, new)


def _mask(ids: jax.Array, count: int) -> jax.Array:
    return jnp.zeros(count, bool).at[ids].set(True)
