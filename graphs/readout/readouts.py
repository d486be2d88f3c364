"""Readouts: reductions of the nodes or edges of each graph of a batch, under DGL's names.

Everything is computed in float32 and rounded once. Padding does not count, and padding graphs have zeros.

Source: https://docs.dgl.ai/api/python/dgl.html#batching-and-reading-out-ops
"""

import functools
from collections.abc import Callable, Mapping

import jax

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.fn import Reduction
from jmp_train.graphs.kernels import REDUCTIONS
from jmp_train.graphs.readout.graph_features import Part, graph_segments, rows_of
from jmp_train.graphs.structure import Adjacency, AnyBatch, batch_of, checked_word, common_dtype, in_float32, upcast

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
