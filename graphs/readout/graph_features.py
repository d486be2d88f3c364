"""Readouts, softmax, running sums and broadcasts within each graph of a batch, under DGL's names.

Readouts reduce the nodes or edges of each graph. Everything is computed in float32 and rounded once. Padding does not
count, and padding graphs have zeros.

Source: https://docs.dgl.ai/api/python/dgl.html#batching-and-reading-out-ops
"""

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import jax
import jax.numpy as jnp

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.fn import Reduction
from jmp_train.graphs.kernels import REDUCTIONS
from jmp_train.graphs.structure import (
    Adjacency,
    AnyBatch,
    Graph,
    Incidence,
    as_inexact,
    batch_of,
    checked_rows,
    checked_word,
    common_dtype,
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


_NAMES: tuple[Reduction, ...] = ("sum", "mean", "max", "min", "var", "std")
OPERATIONS: Mapping[str, Callable[[Adjacency, jax.Array], jax.Array]] = {name: REDUCTIONS[name] for name in _NAMES}


def readout_nodes(
    graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None, *, op: str = "sum"
) -> jax.Array:
    """Returns a reduction of the nodes of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: the name of a feature of the nodes, or an array [nodes, ...].
      weight: the name or the array of a factor of the nodes, [nodes] or [nodes, ...]; None for 1.
      op: "sum", "mean", "max", "min", "var" or "std".

    Returns:
      [graphs, ...] in the feature's dtype; 0 for graphs without nodes and for padding graphs. Sums and means of
      integers have the dtypes of `segment_sum` and `segment_mean`.

    Raises:
      ValueError: a feature is missing, shapes do not fit, or `op` is unknown.
      TypeError: `graph` is not a graph.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> readout_nodes(pair, "h", op="std").tolist()
      [1.0, 0.0]
    """
    return _readout(graph, "nodes", feature, weight, op)


def readout_edges(
    graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None, *, op: str = "sum"
) -> jax.Array:
    """Returns a reduction of the edges of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: the name of a feature of the edges, or an array [edges, ...].
      weight: the name or the array of a factor of the edges, [edges] or [edges, ...]; None for 1.
      op: "sum", "mean", "max", "min", "var" or "std".

    Returns:
      [graphs, ...] in the feature's dtype; 0 for graphs without edges and for padding graphs. Sums and means of
      integers have the dtypes of `segment_sum` and `segment_mean`.

    Raises:
      ValueError: a feature is missing, shapes do not fit, or `op` is unknown.
      TypeError: `graph` is not a graph.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> readout_edges(pair, "w", op="std").tolist()
      [1.0, 0.0]
    """
    return _readout(graph, "edges", feature, weight, op)


def sum_nodes(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the sum of the nodes of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_nodes`.
      weight: see `readout_nodes`.

    Returns:
      [graphs, ...], see `readout_nodes`.

    Raises:
      ValueError: see `readout_nodes`.
      TypeError: see `readout_nodes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> sum_nodes(pair, "h").tolist()
      [4.0, 7.0]
    """
    return _readout(graph, "nodes", feature, weight, "sum")


def sum_edges(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the sum of the edges of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_edges`.
      weight: see `readout_edges`.

    Returns:
      [graphs, ...], see `readout_edges`.

    Raises:
      ValueError: see `readout_edges`.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> sum_edges(pair, "w").tolist()
      [4.0, 7.0]
    """
    return _readout(graph, "edges", feature, weight, "sum")


def mean_nodes(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the mean of the nodes of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_nodes`.
      weight: see `readout_nodes`.

    Returns:
      [graphs, ...], see `readout_nodes`.

    Raises:
      ValueError: see `readout_nodes`.
      TypeError: see `readout_nodes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> mean_nodes(pair, "h").tolist()
      [2.0, 7.0]
    """
    return _readout(graph, "nodes", feature, weight, "mean")


def mean_edges(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the mean of the edges of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_edges`.
      weight: see `readout_edges`.

    Returns:
      [graphs, ...], see `readout_edges`.

    Raises:
      ValueError: see `readout_edges`.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> mean_edges(pair, "w").tolist()
      [2.0, 7.0]
    """
    return _readout(graph, "edges", feature, weight, "mean")


def max_nodes(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the elementwise maximum of the nodes of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_nodes`.
      weight: see `readout_nodes`.

    Returns:
      [graphs, ...], see `readout_nodes`.

    Raises:
      ValueError: see `readout_nodes`.
      TypeError: see `readout_nodes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> max_nodes(pair, "h").tolist()
      [3.0, 7.0]
    """
    return _readout(graph, "nodes", feature, weight, "max")


def max_edges(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the elementwise maximum of the edges of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_edges`.
      weight: see `readout_edges`.

    Returns:
      [graphs, ...], see `readout_edges`.

    Raises:
      ValueError: see `readout_edges`.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> max_edges(pair, "w").tolist()
      [3.0, 7.0]
    """
    return _readout(graph, "edges", feature, weight, "max")


def min_nodes(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the elementwise minimum of the nodes of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_nodes`.
      weight: see `readout_nodes`.

    Returns:
      [graphs, ...], see `readout_nodes`.

    Raises:
      ValueError: see `readout_nodes`.
      TypeError: see `readout_nodes`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0], [1], 2), from_edges([], [], 1)]).with_nodes(h=jnp.array([1.0, 3.0, 7.0]))
      >>> min_nodes(pair, "h").tolist()
      [1.0, 7.0]
    """
    return _readout(graph, "nodes", feature, weight, "min")


def min_edges(graph: AnyBatch, feature: str | Floats, weight: str | Floats | None = None) -> jax.Array:
    """Returns the elementwise minimum of the edges of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: see `readout_edges`.
      weight: see `readout_edges`.

    Returns:
      [graphs, ...], see `readout_edges`.

    Raises:
      ValueError: see `readout_edges`.
      TypeError: see `readout_edges`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([0, 1], [1, 0], 2), from_edges([0], [0], 1)])
      >>> pair = pair.with_edges(w=jnp.array([1.0, 3.0, 7.0]))
      >>> min_edges(pair, "w").tolist()
      [1.0, 7.0]
    """
    return _readout(graph, "edges", feature, weight, "min")


def _readout(graph: AnyBatch, part: Part, feature: str | Floats, weight: str | Floats | None, op: str) -> jax.Array:
    reduce = OPERATIONS[checked_word("op", op, OPERATIONS)]
    graph = batch_of(graph)
    rows = rows_of(graph, part, feature)
    segments = graph_segments(graph, part)
    weights = () if weight is None else (_aligned(rows_of(graph, part, weight), rows),)

    @jax.checkpoint
    def compute(rows: jax.Array, *weights: jax.Array) -> jax.Array:
        rows = functools.reduce(_product, weights, upcast(rows))
        return reduce(Adjacency((segments, segments)), rows)

    return in_float32(compute, rows, *weights)


def _product(rows: jax.Array, weights: jax.Array) -> jax.Array:
    weights = upcast(weights)
    dtype = common_dtype(rows.dtype, weights.dtype)
    return rows.astype(dtype) * weights.astype(dtype)


def _aligned(weight: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a weight with missing axes inserted after its first."""
    shape = (weight.shape[0], *[1] * (rows.ndim - weight.ndim), *weight.shape[1:])
    if len(shape) != rows.ndim or any(x not in (1, y) for x, y in zip(shape, rows.shape, strict=True)):
        raise ValueError(f"weight must fit the shape of the feature, {rows.shape}, got {weight.shape}")
    return weight.reshape(shape)
