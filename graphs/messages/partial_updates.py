"""Message passing along some edges, or into or out of some nodes: only what they reach changes."""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message, Reduce
from jmp_train.graphs.frames import (
    frame_of,
    nodes_of,
    receive,
    some_edges,
    target_type,
    where_edges,
)
from jmp_train.graphs.hetero_graph import EdgeType
from jmp_train.graphs.user_functions import EdgeFunction, NodeFunction, apply_to_nodes
from jmp_train.graphs.writing import (
    AnyGraph,
    accepts_jraph,
    checked_ids,
    edge_ids,
    merged,
    with_node_features,
)


@accepts_jraph
def send_and_recv(
    graph: Any,
    edges: Any,
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> Any:
    """Returns the graph after some edges have sent; only their receivers change.

    Args:
      graph: a graph of ours or jraph's.
      edges: int [some edges], or a pair of senders and receivers, all edges between which are meant.
      message: see `update_all`.
      reduce: see `update_all`; user-defined ones outside of jit only.
      apply: a function of `NodeBatch`, row by row, called with all nodes in the end; the rows of the
        receivers are taken.
      etype: the edge type; needed where there are several.

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
    ids = edge_ids(frame.connections, edges)
    if ids.shape[0] == 0:
        return graph
    part = some_edges(frame, ids)
    is_reached = part.connections.targets.degrees > 0
    return _received(graph, receive(part, message, reduce), is_reached, apply, etype)


@accepts_jraph
def pull(
    graph: Any,
    nodes: Any,
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> Any:
    """Returns the graph after some nodes have reduced the messages of all edges that enter them.

    Args:
      graph: a graph of ours or jraph's.
      nodes: int [some nodes], which; only these change, those without messages too.
      message: see `update_all`.
      reduce: see `update_all`.
      apply: see `send_and_recv`.
      etype: the edge type; needed where there are several.

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
    count = frame.connections.targets.num_segments
    ids = checked_ids("nodes", nodes, count)
    if ids.shape[0] == 0:
        return graph
    return _received(graph, receive(frame, message, reduce), _mask(ids, count), apply, etype)


@accepts_jraph
def push(
    graph: Any,
    nodes: Any,
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> Any:
    """Returns the graph after some nodes have sent along all edges that leave them.

    Args:
      graph: a graph of ours or jraph's.
      nodes: int [some nodes], which send; only nodes that they reach change.
      message: see `update_all`.
      reduce: see `update_all`; user-defined ones outside of jit only.
      apply: see `send_and_recv`.
      etype: the edge type; needed where there are several.

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
    sources = frame.connections.sources
    ids = checked_ids("nodes", nodes, sources.num_segments)
    if ids.shape[0] == 0:
        return graph
    part = where_edges(frame, sources.read(_mask(ids, sources.num_segments)))
    is_reached = part.connections.targets.degrees > 0
    return _received(graph, receive(part, message, reduce), is_reached, apply, etype)


def prop_nodes(
    graph: AnyGraph,
    frontiers: Iterable[Any],
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> AnyGraph:
    """Returns the graph after frontiers of nodes have pulled, one after another.

    Args:
      graph: a graph of ours or jraph's.
      frontiers: of each step, the nodes that pull, int [some nodes].
      message: see `update_all`.
      reduce: see `update_all`.
      apply: see `send_and_recv`.
      etype: the edge type; needed where there are several.

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
    frontiers: Iterable[Any],
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
) -> AnyGraph:
    """Returns the graph after frontiers of edges have sent, one after another.

    Args:
      graph: a graph of ours or jraph's.
      frontiers: of each step, the edges that send, as `send_and_recv` takes them.
      message: see `update_all`.
      reduce: see `send_and_recv`.
      apply: see `send_and_recv`.
      etype: the edge type; needed where there are several.

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


def _received(
    graph: Any,
    results: dict[str, jax.Array],
    is_written: jax.Array,
    apply: NodeFunction | None,
    etype: str | EdgeType | None,
) -> Any:
    """Returns the graph with results, and what is applied to them, in the rows of a mask."""
    ntype = target_type(graph, etype)
    old, count = nodes_of(graph, ntype)
    new = merged(old, results, is_written)
    if apply is not None:
        seen = {**old, **new}
        new |= merged(seen, apply_to_nodes(apply, seen, count), is_written)
    return with_node_features(graph, ntype, new)


def _mask(ids: jax.Array, count: int) -> jax.Array:
    return jnp.zeros(count, bool).at[ids].set(True)
