"""Message passing over several edge types at once, whose results are reduced at the nodes they reach."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message, Reduce
from jmp_train.graphs.messages.frames import frame_of
from jmp_train.graphs.messages.send_receive import Reduction, receive
from jmp_train.graphs.messages.user_functions import EdgeFunction, NodeFunction, call_node_function, with_node_features
from jmp_train.graphs.structure import (
    EdgeType,
    HeteroGraph,
    as_inexact,
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
      cross: how results of one name are combined: "sum", "mean", "max" or "min", in float32 and rounded once;
        "stack" along axis 1 by the sorted edge types; or a function of the list of results. A
        result that is alone stays as it is.
      apply: a function of `NodeBatch`, called with all nodes of each type that edges of these types enter.

    Returns:
      The graph. Under "max" and "min", an edge type of which a node gets no messages to take the max or min
      of does not count there.

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
    if not callable(cross) and cross not in CROSS_REDUCERS:
        choices = ", ".join(CROSS_REDUCERS)
        raise ValueError(f"cross={cross!r} must be a function or one of {choices}")
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
    return _extreme(jnp.maximum if cross == "max" else jnp.minimum, parts)


def _extreme(larger: Callable[[jax.Array, jax.Array], jax.Array], parts: Sequence[_Part]) -> jax.Array:
    """Returns the extreme of what counts, 0 where nothing does."""
    first, *rest = parts
    result, is_found = first.rows, rows_like(first.counts, first.rows)
    for part in rest:
        counts = rows_like(part.counts, part.rows)
        both = larger(result, part.rows)
        result = jnp.where(is_found & counts, both, jnp.where(counts, part.rows, result))
        is_found = is_found | counts
    return result
