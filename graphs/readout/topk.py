"""The largest nodes or edges of each graph of a batch, by one of their features or by each feature separately."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.readout.graph_features import Part, graph_segments, rows_of
from jmp_train.graphs.structure import AnyBatch, Incidence, as_count, batch_of, in_float32, upcast


class TopK(NamedTuple):
    """The first rows of each graph, in the requested order.

    Attributes:
      values: [graphs, k, ...], the rows; 0 if a graph has fewer.
      places: int32 [graphs, k], or [graphs, k, ...] if each feature is sorted separately: the rows' places in their
        graph, from 0; -1 if a graph has fewer.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> topk_nodes(from_edges([], [], 2), jnp.array([1, 5]), 1)
      TopK(values=Array([[5]], dtype=int32), places=Array([[1]], dtype=int32))
    """

    values: jax.Array
    places: jax.Array


def topk_nodes(
    graph: AnyBatch, feature: str | Floats, k: int, *, descending: bool = True, sortby: int | None = None
) -> TopK:
    """Returns the k nodes with the largest feature of each graph of a batch.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: the name of a feature of the nodes, or an array [nodes, ...], real.
      k: number of nodes.
      descending: True to put the largest first, False for the smallest. NaN comes last.
      sortby: index on the last axis of [nodes, width] by which rows are sorted; None sorts each entry separately.

    Returns:
      The values and the places in their graph. Among equal ones the first node comes first.

    Raises:
      ValueError: the feature is missing, `k` is negative, or `sortby` is out of range.
      TypeError: `graph` is not a graph, or `k` is not an integer.

    Example:
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([], [], 3), from_edges([], [], 1)])
      >>> found = topk_nodes(pair, jnp.array([1.0, 9.0, 4.0, 7.0]), 2)
      >>> found.values.tolist(), found.places.tolist()
      ([[9.0, 4.0], [7.0, 0.0]], [[1, 2], [0, -1]])
    """
    return _topk(graph, "nodes", feature, k, descending, sortby)


def topk_edges(
    graph: AnyBatch, feature: str | Floats, k: int, *, descending: bool = True, sortby: int | None = None
) -> TopK:
    """Returns the k edges with the largest feature of each graph of a batch; see `topk_nodes`.

    Args:
      graph: see `topk_nodes`.
      feature: the name of a feature of the edges, or an array [edges, ...], real.
      k: number of edges.
      descending: see `topk_nodes`.
      sortby: see `topk_nodes`.

    Returns:
      The values and the places in their graph.

    Raises:
      ValueError: see `topk_nodes`.
      TypeError: see `topk_nodes`.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> topk_edges(graph, jnp.array([5.0, 2.0, 3.0]), 2, descending=False).places.tolist()
      [[1, 2]]
    """
    return _topk(graph, "edges", feature, k, descending, sortby)


def _topk(graph: AnyBatch, part: Part, feature: str | Floats, k: int, descending: bool, sortby: int | None) -> TopK:
    graph, k = batch_of(graph), as_count("k", k)
    rows = rows_of(graph, part, feature)
    if sortby is not None and (rows.ndim != 2 or not -rows.shape[1] <= sortby < rows.shape[1]):
        raise ValueError(
            f"sortby={sortby} is out of range for the last axis of the feature [{part}, width], {rows.shape}"
        )
    segments = graph_segments(graph, part)
    keys = rows.reshape(rows.shape[0], math.prod(rows.shape[1:])) if sortby is None else rows[:, sortby][:, None]
    order = _sorted_places(segments, jax.lax.stop_gradient(keys), descending)
    starts = jnp.cumsum(segments.degrees) - segments.degrees
    offsets = jnp.arange(k, dtype=jnp.int32)
    exists = offsets < segments.degrees[:, None]
    sorted_places = jnp.where(exists, starts[:, None] + offsets, rows.shape[0])  # [graphs, k]
    found = order.at[sorted_places].get(mode="fill", fill_value=rows.shape[0])  # [graphs, k, columns]
    counts = graph.n_node if part == "nodes" else graph.n_edge
    firsts = jnp.cumsum(counts) - counts
    places = jnp.where(exists[..., None], found - firsts[:, None, None], -1)
    shape = (len(segments.degrees), k, *rows.shape[1:])

    def values(rows: jax.Array) -> jax.Array:
        if sortby is not None:
            return upcast(rows).at[found[..., 0]].get(mode="fill", fill_value=0)
        columns = jnp.arange(keys.shape[1])
        flat = upcast(rows).reshape(keys.shape)
        return flat.at[found, columns].get(mode="fill", fill_value=0).reshape(shape)

    return TopK(in_float32(values, rows), places[..., 0] if sortby is not None else places.reshape(shape))


def _sorted_places(segments: Incidence, keys: jax.Array, descending: bool) -> jax.Array:
    """Returns the row numbers, int32 [rows, columns], sorted by segment and then by each column of the keys."""
    if keys.dtype == jnp.bool_:
        keys = keys.astype(jnp.int32)
    if descending:
        keys = -keys if jnp.issubdtype(keys.dtype, jnp.floating) else ~keys
    ids = jnp.broadcast_to(segments.ids[:, None], keys.shape)
    numbers = jnp.broadcast_to(jnp.arange(len(keys), dtype=jnp.int32)[:, None], keys.shape)
    return jax.lax.sort((ids, keys, numbers), dimension=0, is_stable=True, num_keys=2)[2]


def sort_pooling(graph: AnyBatch, features: Floats, k: int) -> jax.Array:
    """Returns the k nodes with the largest channel of each graph of a batch, concatenated, each node sorted.

    Args:
      graph: see `topk_nodes`.
      features: floating [nodes, width].
      k: number of nodes.

    Returns:
      [graphs, k * width] in the features' dtype: for each node its sorted features, the largest last; nodes descend by
      their largest feature. 0 if a graph has fewer nodes.

    Raises:
      ValueError: shapes do not fit.
      TypeError: `graph` is not a graph.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> sort_pooling(from_edges([], [], 2), jnp.array([[3.0, 1.0], [2.0, 9.0]]), 3).tolist()
      [[2.0, 9.0, 1.0, 3.0, 0.0, 0.0]]

    Reference: Zhang et al., An End-to-End Deep Learning Architecture for Graph Classification, AAAI 2018; DGL's
    SortPooling.
    """
    graph = batch_of(graph)
    rows = rows_of(graph, "nodes", features)
    if rows.ndim != 2:
        raise ValueError(f"features must be [nodes, width], got shape {rows.shape}")
    values = topk_nodes(graph, jnp.sort(rows, axis=-1), k, sortby=-1).values
    return values.reshape(values.shape[0], -1)
