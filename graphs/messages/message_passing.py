"""DGL's message passing as pure functions: each takes a graph, and returns one with new features."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.fn import Message, Reduce
from jmp_train.graphs.messages.frames import (
    Edges,
    checked_ids,
    edge_ids,
    frame_of,
    nodes_of,
    some_edges,
)
from jmp_train.graphs.messages.segment import gather
from jmp_train.graphs.messages.send_receive import Reduction, receive, send
from jmp_train.graphs.messages.user_functions import (
    EdgeFunction,
    NodeFunction,
    call_node_function,
    placed,
    with_edge_features,
    with_node_features,
)
from jmp_train.graphs.structure import (
    EdgeType,
    HeteroGraph,
    OurGraph,
    accepts_jraph,
    as_inexact,
    checked_word,
    extreme_of_two,
    rows_like,
    upcast,
    upcast_integers,
)

Functions = tuple[Message | EdgeFunction, Reduction] | tuple[Message | EdgeFunction, Reduction, NodeFunction]
Cross = str | Callable[[Sequence[jax.Array]], jax.Array]
CROSS_REDUCERS = ("sum", "mean", "max", "min", "stack")


def multi_update_all(
    graph: HeteroGraph,
    functions: Mapping[str, Functions] | Mapping[EdgeType, Functions],
    cross: Cross,
    apply: NodeFunction | None = None,
) -> HeteroGraph:
    """Returns the graph after `update_all` over several edge types, with results reduced at each node.

    Args:
      graph: a graph with several edge types.
      functions: by edge type, the message, the reduction and perhaps a function to apply to its result.
      cross: the combination of results of one name: "sum", "mean", "max" or "min", in float32 and rounded once;
        "stack" along axis 1 by the sorted edge types; or a function of the list of results. A single result is
        unchanged.
      apply: a function of `NodeBatch`, called with all nodes of each type that edges of these types enter.

    Returns:
      The graph. Under "max" and "min", edge types without messages for a node do not count.

    Raises:
      ValueError: `cross` or an edge type is unknown, or see `update_all`.
      TypeError: see `update_all`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, hetero_from_edges
      >>> plays, makes = ("user", "plays", "game"), ("firm", "makes", "game")
      >>> graph = hetero_from_edges(
      ...     {plays: ([0, 1], [0, 0]), makes: ([0], [0])}, {"user": 2, "firm": 1, "game": 1},
      ...     nodes={"user": {"h": jnp.ones(2)}, "firm": {"h": jnp.full(1, 5.0)}})
      >>> send, add = fn.copy_u("h", "m"), fn.sum("m", "h")
      >>> multi_update_all(graph, {plays: (send, add), makes: (send, add)}, "max").nodes["game"]["h"]
      Array([5.], dtype=float32)
    """
    if not callable(cross):
        checked_word("cross", cross, CROSS_REDUCERS)
    if not isinstance(graph, HeteroGraph):
        raise TypeError(f"graph must be a HeteroGraph, got {type(graph).__name__}")
    by_type = {graph.edge_type(kind): value for kind, value in functions.items()}
    parts: dict[str, dict[str, list[_Part]]] = {}
    for kind in sorted(by_type):  # as jit sorts the keys of dictionaries
        for name, part in _results(graph, kind, by_type[kind]).items():
            parts.setdefault(kind[2], {}).setdefault(name, []).append(part)
    for node_type, features in parts.items():
        combined = {name: _combined(cross, results) for name, results in features.items()}
        graph = with_node_features(graph, node_type, combined, apply)
    return graph


def update_over_types(
    graph: HeteroGraph,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None,
) -> HeteroGraph:
    """Returns the graph after one reduction over the edges of all types.

    Raises:
      ValueError: a function is user-defined, or the reduction is none of sum, max and min: a mean of means is
        not the mean.
    """
    if not (isinstance(message, Message) and isinstance(reduce, Reduce)) or (
        reduce.reduction not in ("sum", "max", "min")
    ):
        raise ValueError(
            "over several edge types, update_all supports only built-in messages with sum, max or min; select "
            "one type with etype, or use multi_update_all"
        )
    functions = dict.fromkeys(graph.connections, (message, reduce))
    return multi_update_all(graph, functions, reduce.reduction, apply)


class _Part(NamedTuple):
    """The result of one edge type: rows [nodes, ...], and whether they count, bool [nodes]."""

    rows: jax.Array
    counts: jax.Array


def _results(graph: HeteroGraph, kind: EdgeType, functions: Functions) -> dict[str, _Part]:
    if not isinstance(functions, tuple) or len(functions) not in (2, 3):
        raise TypeError(f"functions[{kind}] must be (message, reduce[, apply]), got {functions!r}")
    message, reduce, *rest = functions
    frame = frame_of(graph, kind)
    results = receive(frame, message, reduce)
    degrees = frame.adjacency.in_degrees
    if rest:
        results |= call_node_function(rest[0], {**frame.dst, **results}, degrees.shape[0])
    built_in = () if callable(reduce) else (reduce,) if isinstance(reduce, Reduce) else reduce
    always = {one.out for one in built_in if one.reduction not in ("max", "min")}
    has_extreme = len(built_in) > len(always)
    counts = degrees > 0 if has_extreme else jnp.ones(degrees.shape, bool)
    return {name: _Part(x, counts | (name in always)) for name, x in results.items()}


def _combined(cross: Cross, parts: Sequence[_Part]) -> jax.Array:
    rows = [part.rows for part in parts]
    if callable(cross):
        return cross(rows)
    if len(parts) == 1:
        return rows[0]
    if cross == "stack":
        return jnp.stack(rows, axis=1)
    if cross in ("sum", "mean"):
        rows = [upcast_integers(x) if cross == "sum" else as_inexact(x) for x in rows]
        total = functools.reduce(jnp.add, map(upcast, rows))
        return (total / len(rows) if cross == "mean" else total).astype(rows[0].dtype)
    return _extreme(cross == "max", parts)


def _extreme(is_max: bool, parts: Sequence[_Part]) -> jax.Array:
    """Returns the largest or the least of the values that count, or 0 without any."""
    first, *rest = parts
    result, is_found = first.rows, rows_like(first.counts, first.rows)
    for part in rest:
        counts = rows_like(part.counts, part.rows)
        both = extreme_of_two(is_max, result, part.rows)
        result = jnp.where(is_found & counts, both, jnp.where(counts, part.rows, result))
        is_found = is_found | counts
    return result


@accepts_jraph
def update_all(
    graph: OurGraph,
    message: Message | EdgeFunction,
    reduce: Reduction,
    apply: NodeFunction | None = None,
    *,
    etype: str | EdgeType | None = None,
    implementation: str | None = None,
) -> OurGraph:
    """Returns the graph after each node has reduced the messages of all edges that enter it.

    Args:
      graph: a graph of ours or jraph's.
      message: a message of `fn`, a function of one edge marked by `per_edge`, or a function of `EdgeBatch`, all edges,
        to a dictionary of messages.
      reduce: a reduction of `fn`, or several of the same message, which is then computed once, or a function of
        `NodeBatch` to a dictionary of node features, which is called once for each in-degree; under jit the graph
        needs `formats=("mailbox",)` for it.
      apply: a function of `NodeBatch` to a dictionary of node features, called with all nodes in the end.
      etype: the edge type. Without it, a graph with several reduces over the edges of all.
      implementation: "chunked" goes over chunks of sorted edges, stores no message, and has reverse mode
        only; it takes built-in messages of floats of one precision, and functions of one edge. "xla" computes with
        arrays of all edges, which XLA may fuse, and goes through every transform. None for "chunked" if the graph has
        `formats=("csr",)` and messages are large.

    Returns:
      The graph with the result among its nodes' features, in the messages' features' dtype: computed in
      float32 and rounded once. Nodes without messages get 0, of every reduction but `argmax` and `argmin`, the
      places of edges as int32, of which they get -1; true infinities stay. Variances are those of all messages of
      a node, divided by their number; where all are equal, the gradient of their standard deviation is 0.

    Raises:
      ValueError: a feature is missing, or shapes or names do not fit; the message names them.
      TypeError: a user-defined reduction meets a graph under jit that has no mailboxes.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1, 2], [2, 2, 0], 3, nodes={"h": jnp.arange(3.0)})
      >>> update_all(graph, fn.copy_u("h", "m"), fn.sum("m", "x")).nodes["x"].tolist()
      [2.0, 0.0, 1.0]
      >>> both = update_all(graph, fn.copy_u("h", "m"), [fn.std("m", "spread"), fn.argmax("m", "edge")])
      >>> both.nodes["spread"].tolist(), both.nodes["edge"].tolist()
      ([0.0, 0.0, 0.5], [2, -1, 1])

    Reference: Wang et al., Deep Graph Library, https://arxiv.org/abs/1909.01315.
    """
    if isinstance(graph, HeteroGraph) and etype is None and len(graph.connections) > 1:
        return update_over_types(graph, message, reduce, apply)
    frame = frame_of(graph, etype)
    results = receive(frame, message, reduce, implementation)
    return with_node_features(graph, frame.receiver_type, results, apply)


@accepts_jraph
def apply_edges(
    graph: OurGraph,
    message: Message | EdgeFunction,
    edges: Edges | None = None,
    *,
    etype: str | EdgeType | None = None,
    implementation: str | None = None,
) -> OurGraph:
    """Returns the graph with features of its edges computed.

    Args:
      graph: a graph of ours or jraph's.
      message: a message of `fn`, or a function of `EdgeBatch` to a dictionary of edge features.
      edges: int [some edges], or a pair of senders and receivers, all edges between which are meant; None
        for all edges. The others keep their features, or get 0 for a new name.
      etype: the edge type; required if there are several.
      implementation: see `update_all`; `u_dot_v` can be chunked.

    Returns:
      The graph with the results among its edges' features, in the caller's order.

    Raises:
      ValueError: a feature or edge is missing, or shapes do not fit.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import fn, from_edges
      >>> graph = from_edges([0, 1], [1, 1], 2, nodes={"h": jnp.full((2, 4), 90, "float16")})
      >>> apply_edges(graph, fn.u_dot_v("h", "h", "score")).edges["score"].tolist()
      [[32400.0], [32400.0]]
    """
    frame = frame_of(graph, etype)
    if edges is None:
        results = send(frame, message, implementation=implementation)
        return with_edge_features(graph, etype, results)
    ids = edge_ids(frame.adjacency, edges)
    results = send(some_edges(frame, ids), message, ids)
    count = frame.adjacency.receivers.num_edges
    return with_edge_features(graph, etype, placed(frame.data, results, ids, count))


@accepts_jraph
def apply_nodes(
    graph: OurGraph, function: NodeFunction, nodes: Ids | None = None, *, ntype: str | None = None
) -> OurGraph:
    """Returns the graph with features of its nodes computed.

    Args:
      graph: a graph of ours or jraph's.
      function: a function of `NodeBatch`, with an empty mailbox, to a dictionary of node features.
      nodes: int [some nodes], which; None for all. The others keep their features, or get 0 for a new name.
      ntype: the node type, of graphs with several.

    Returns:
      The graph with the results among its nodes' features.

    Raises:
      ValueError: a node or the node type is unknown.
      TypeError: the function returns no dictionary.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0], [1], 2, nodes={"h": jnp.arange(2.0)})
      >>> apply_nodes(graph, lambda nodes: {"h": 2 * nodes.data["h"]}).nodes["h"].tolist()
      [0.0, 2.0]
    """
    features, count = nodes_of(graph, ntype)
    if nodes is None:
        return with_node_features(graph, ntype, {}, function)
    ids = checked_ids("nodes", nodes, count)
    some = {name: gather(feature, ids) for name, feature in features.items()}
    results = call_node_function(function, some, ids.shape[0], ids)
    return with_node_features(graph, ntype, placed(features, results, ids, count))
