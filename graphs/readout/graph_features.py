"""Softmax, running sums and broadcasts within each graph of a batch.

Everything is computed in float32 and rounded once, and padding has zeros.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.structure import (
    AnyBatch,
    Graph,
    Incidence,
    as_inexact,
    batch_of,
    checked_rows,
    checked_word,
    in_float32,
    incidence_of,
    is_real,
    upcast,
    upcast_integers,
)

Part = Literal["nodes", "edges"]


def graph_segments(graph: Graph, part: Part) -> Incidence:
    """Returns the graph of the batch to which each node, or edge, belongs; padding does not count.

    Args:
      graph: a graph or a batch, padded or not, also under jit.
      part: "nodes" or "edges".
    """
    counts, total = (graph.n_node, graph.num_nodes) if part == "nodes" else (graph.n_edge, graph.num_edges)
    segments = _segments(counts, graph.n_node if graph.is_padded else None, total)
    ends = graph.connections.ends
    if part == "nodes":
        return segments if graph.kept_nodes is None else segments.where(graph.kept_nodes)
    return segments if ends is None or ends[1].all_count else segments.where(ends[1].is_counted)


@functools.partial(jax.jit, static_argnames="total", inline=True)  # one program outside of jit too
def _segments(counts: jax.Array, n_node: jax.Array | None, total: int) -> Incidence:
    """Returns the graph of each of `total` nodes or edges; `n_node` are the nodes of padded graphs."""
    count = counts.shape[0]
    ids = jnp.repeat(jnp.arange(count, dtype=jnp.int32), counts, total_repeat_length=total)
    if n_node is not None:
        ids = jnp.where(is_real(n_node, counts, total), ids, count)
    return incidence_of(ids, count, is_sorted=True)


def rows_of(graph: Graph, part: Part, feature: str | Floats) -> jax.Array:
    """Returns a feature's rows, [nodes, ...] or [edges, ...].

    Args:
      graph: a graph or a batch.
      part: "nodes" or "edges".
      feature: the name of a feature of the graph, or the rows themselves.

    Raises:
      ValueError: there is no such feature, or another number of rows.
    """
    if isinstance(feature, str):
        features = graph.nodes if part == "nodes" else graph.edges
        if feature not in features:
            known = ", ".join(map(repr, features)) or "none"
            raise ValueError(f"no feature {feature!r} of the {part}; there are: {known}")
        return features[feature]
    count = graph.num_nodes if part == "nodes" else graph.num_edges
    return checked_rows("feature", feature, count, part)


def softmax_nodes(graph: AnyBatch, feature: str | Floats) -> jax.Array:
    """Returns the softmax over the nodes of each graph of a batch, elementwise.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_nodes`; -inf masks.

    Returns:
      [nodes, ...] in the feature's floating dtype; 0 for padding.

    Raises:
      ValueError: see `readout_nodes`.
      TypeError: see `readout_nodes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> softmax_nodes(pair, jnp.zeros(3)).tolist()
      [0.5, 0.5, 1.0]
    """
    return _softmax(graph, "nodes", feature)


def softmax_edges(graph: AnyBatch, feature: str | Floats) -> jax.Array:
    """Returns the softmax over the edges of each graph of a batch, elementwise.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_edges`; -inf masks.

    Returns:
      [edges, ...] in the feature's floating dtype; 0 for padding.

    Raises:
      ValueError: see `readout_edges`.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> softmax_edges(pair, jnp.zeros(3)).tolist()
      [0.5, 0.5, 1.0]
    """
    return _softmax(graph, "edges", feature)


def broadcast_nodes(graph: AnyBatch, of_graphs: Floats) -> jax.Array:
    """Returns the values of graphs for each of their nodes, with gradients summed in float32.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      of_graphs: an array [graphs, ...].

    Returns:
      [nodes, ...] in the dtype of `of_graphs`; 0 for padding.

    Raises:
      ValueError: there is another number of graphs.
      TypeError: see `readout_nodes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> broadcast_nodes(pair, jnp.array([0.5, 2.0])).tolist()
      [0.5, 0.5, 2.0]
    """
    return _broadcast(graph, "nodes", of_graphs)


def broadcast_edges(graph: AnyBatch, of_graphs: Floats) -> jax.Array:
    """Returns the values of graphs for each of their edges, with gradients summed in float32.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      of_graphs: an array [graphs, ...].

    Returns:
      [edges, ...] in the dtype of `of_graphs`; 0 for padding.

    Raises:
      ValueError: there is another number of graphs.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> broadcast_edges(pair, jnp.array([0.5, 2.0])).tolist()
      [0.5, 0.5, 2.0]
    """
    return _broadcast(graph, "edges", of_graphs)


def edge_cumsum(
    graph: AnyBatch, values: str | Floats, by: str = "dst", *, exclusive: bool = False, reverse: bool = False
) -> jax.Array:
    """Returns running sums along the edges of each node, or of each graph of a batch, in the order of the edges.

    Args:
      graph: see `readout_edges`.
      values: the name of a feature of the edges, or an array [edges, ...].
      by: "dst" for the edges that enter the same node, "src" for those that leave it, "graph" for those of a graph.
      exclusive: True to leave an edge out of its own sum.
      reverse: True to sum from the last edge to the first.

    Returns:
      [edges, ...] in the dtype of the values; 0 for padding. See `segment_cumsum`.

    Raises:
      ValueError: see `readout_edges`; or `by` is unknown.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [2, 0, 2], 3)
      >>> edge_cumsum(graph, jnp.array([1.0, 2.0, 4.0])).tolist(), edge_cumsum(graph, jnp.ones(3), "graph").tolist()
      ([1.0, 2.0, 5.0], [1.0, 2.0, 3.0])
    """
    graph = batch_of(graph)
    rows = rows_of(graph, "edges", values)
    if checked_word("by", by, ("dst", "src", "graph")) == "graph":
        segments = graph_segments(graph, "edges")
    else:
        segments = graph.connections.receivers if by == "dst" else graph.connections.senders

    def compute(rows: jax.Array) -> jax.Array:
        return segments.cumsum(upcast(upcast_integers(rows)), exclusive=exclusive, reverse=reverse)

    return in_float32(compute, rows)


def _softmax(graph: AnyBatch, part: Part, feature: str | Floats) -> jax.Array:
    graph = batch_of(graph)
    logits = as_inexact(rows_of(graph, part, feature))
    softmax = jax.checkpoint(lambda segments, logits: segments.softmax(upcast(logits)))
    segments = graph_segments(graph, part)
    return in_float32(lambda logits: softmax(segments, logits), logits)


def _broadcast(graph: AnyBatch, part: Part, of_graphs: Floats) -> jax.Array:
    graph = batch_of(graph)
    rows = checked_rows("of_graphs", of_graphs, graph.n_node.shape[0], "graphs")
    segments = graph_segments(graph, part)
    return in_float32(lambda rows: segments.read(upcast(rows)), rows)
