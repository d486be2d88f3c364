"""Attention pooling and Set2Set, sums of nodes weighted by a softmax over each graph; the largest nodes or edges."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.readout.graph_features import Part, graph_segments, rows_of
from jmp_train.graphs.structure import (
    AnyBatch,
    Incidence,
    as_count,
    batch_of,
    common_dtype,
    in_float32,
    lstm_cell,
    upcast,
)


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


Gate = Callable[[jax.Array], jax.Array]
LSTMWeights = tuple[Floats, Floats, Floats, Floats]


def attention_pooling(graph: AnyBatch, features: Floats, logits: Floats) -> jax.Array:
    """Returns the sum of the nodes of each graph of a batch, weighted by a softmax of logits over the graph.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      features: floating [nodes, ...].
      logits: floating [nodes, 1], or with as many axes as the features, to which it broadcasts.

    Returns:
      [graphs, ...] in the dtype that both promote to, computed in float32 and rounded once.

    Raises:
      ValueError: shapes do not fit.
      TypeError: `graph` is not a graph.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([], [], 2)
      >>> attention_pooling(graph, jnp.array([[2.0], [4.0]]), jnp.zeros((2, 1))).tolist()
      [[3.0]]

    Reference: Li et al., Gated Graph Sequence Neural Networks, https://arxiv.org/abs/1511.05493; DGL's
    GlobalAttentionPooling.
    """
    graph = batch_of(graph)
    rows, logits = rows_of(graph, "nodes", features), rows_of(graph, "nodes", logits)
    if logits.ndim != rows.ndim or any(x not in (1, y) for x, y in zip(logits.shape[1:], rows.shape[1:], strict=True)):
        raise ValueError(f"logits must broadcast to the shape of the features, {rows.shape}, got {logits.shape}")
    segments = graph_segments(graph, "nodes")

    @jax.checkpoint
    def pooled(rows: jax.Array, logits: jax.Array) -> jax.Array:
        dtype = common_dtype(upcast(rows).dtype, upcast(logits).dtype)
        weights = segments.softmax(upcast(logits)).astype(dtype)
        return segments.sum(weights * upcast(rows).astype(dtype))

    return in_float32(pooled, rows, logits)


class GlobalAttentionPooling(nnx.Module):
    """The layer of `attention_pooling`: `layer(graph, features)`, as in DGL.

    Args:
      gate: an nnx module or a function from features [nodes, width] to logits [nodes, 1].
      transform: a module or function of the features to sum; None for the features themselves.

    Example:
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([], [], 2), from_edges([], [], 1)])
      >>> layer = GlobalAttentionPooling(nnx.Linear(4, 1, rngs=nnx.Rngs(0)))
      >>> layer(pair, jnp.ones((3, 4))).shape
      (2, 4)
    """

    def __init__(self, gate: Gate, transform: Gate | None = None) -> None:
        self.gate = gate
        self.transform = transform

    def __call__(self, graph: AnyBatch, features: jax.Array) -> jax.Array:
        """Returns the pooled features of each graph, [graphs, width].

        Args:
          graph: see `attention_pooling`.
          features: floating [nodes, width].
        """
        rows = features if self.transform is None else self.transform(features)
        return attention_pooling(graph, rows, self.gate(features))


class SortPooling(nnx.Module):
    """The layer of `sort_pooling`: `layer(graph, features)`, as in DGL.

    Args:
      k: number of nodes kept per graph.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> SortPooling(2)(from_edges([], [], 3), jnp.ones((3, 4))).shape
      (1, 8)
    """

    def __init__(self, k: int) -> None:
        self.k = as_count("k", k)

    def __call__(self, graph: AnyBatch, features: jax.Array) -> jax.Array:
        """Returns the kept nodes of each graph, [graphs, k * width].

        Args:
          graph: see `sort_pooling`.
          features: floating [nodes, width].
        """
        return sort_pooling(graph, features, self.k)


def set2set(graph: AnyBatch, features: Floats, weights: Sequence[LSTMWeights], steps: int) -> jax.Array:
    """Returns the output of an LSTM that attends to the nodes of each graph several times, in no particular order.

    In each step its state attends to the nodes, and the result is its next input.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      features: floating [nodes, width].
      weights: for each layer of the LSTM, the weights of its input [2 * width, 4 * width], in further layers [width,
        4 * width], of its state [width, 4 * width], and two biases [4 * width]; gates in torch's order: input,
        forget, cell, output.
      steps: number of steps.

    Returns:
      [graphs, 2 * width] in the features' dtype: the state, and the last result. States are float32.

    Raises:
      ValueError: shapes do not fit.
      TypeError: `graph` is not a graph, or `steps` is not an integer.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> weights = (jnp.zeros((2, 4)), jnp.zeros((1, 4)), jnp.zeros(4), jnp.zeros(4))
      >>> set2set(from_edges([], [], 2), jnp.array([[1.0], [3.0]]), [weights], 2).tolist()
      [[0.0, 2.0]]

    Reference: Vinyals et al., Order Matters: Sequence to Sequence for Sets, https://arxiv.org/abs/1511.06391; DGL's
    Set2Set.
    """
    graph, steps = batch_of(graph), as_count("steps", steps)
    rows = rows_of(graph, "nodes", features)
    if rows.ndim != 2:
        raise ValueError(f"features must be [nodes, width], got shape {rows.shape}")
    arrays = [tuple(map(jnp.asarray, layer)) for layer in weights]
    width = rows.shape[1]
    for layer, given in enumerate(arrays):
        wanted = list(lstm_layer_shapes(width, layer))
        shapes = [array.shape for array in given]
        if shapes != wanted:
            raise ValueError(f"weights[{layer}] must have shapes {wanted}, got {shapes}")
    segments, count = graph_segments(graph, "nodes"), len(arrays)

    def found(rows: jax.Array, *flat: jax.Array) -> jax.Array:
        return _set2set(segments, rows, flat, count, steps)

    flat = [array for layer in arrays for array in layer]
    return in_float32(found, rows, *flat).astype(rows.dtype)


def lstm_layer_shapes(width: int, layer: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of the weights and biases of one layer of Set2Set's LSTM.

    Args:
      width: width of the features.
      layer: index of the layer, from 0.
    """
    enters = 2 * width if layer == 0 else width
    return (enters, 4 * width), (width, 4 * width), (4 * width,), (4 * width,)


def _set2set(segments: Incidence, rows: jax.Array, flat: Sequence[jax.Array], count: int, steps: int) -> jax.Array:
    weights = [flat[4 * layer : 4 * layer + 4] for layer in range(count)]
    rows = upcast(rows)
    width, dtype = rows.shape[1], rows.dtype
    start = jnp.zeros((segments.num_segments, width), dtype)

    @jax.checkpoint
    def step(carry: tuple[jax.Array, list[tuple[jax.Array, jax.Array]]], _: None) -> tuple[object, None]:
        enters, states = carry
        found = []
        for layer, state in zip(weights, states, strict=True):
            upcast_layer = [upcast(x).astype(dtype) for x in layer]
            found.append(lstm_cell(upcast_layer, enters, state))
            enters = found[-1][0]
        logits = (segments.read(enters) * rows).sum(-1, keepdims=True)
        read = segments.sum(segments.softmax(logits) * rows)
        return (jnp.concatenate([enters, read], -1), found), None

    first = (jnp.zeros((segments.num_segments, 2 * width), dtype), [(start, start)] * count)
    (result, _), _ = jax.lax.scan(step, first, None, length=steps)
    return result


class Set2Set(nnx.Module):
    """The layer of `set2set`: `layer(graph, features)`, as in DGL.

    Args:
      features: the width of a node's features.
      steps: see `set2set`.
      layers: number of layers of the LSTM.
      param_dtype: the dtype of the weights.
      rngs: flax's streams; weights are initialized uniformly, as in torch.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> layer = Set2Set(4, steps=3, layers=2, rngs=nnx.Rngs(0))
      >>> layer(from_edges([], [], 2), jnp.ones((2, 4))).shape
      (1, 8)
    """

    def __init__(
        self, features: int, *, steps: int, layers: int = 1, param_dtype: DTypeLike = jnp.float32, rngs: nnx.Rngs
    ) -> None:
        self.steps = as_count("steps", steps)
        bound = 1 / math.sqrt(features)
        self.weights = nnx.List(
            [
                nnx.List(
                    [
                        nnx.Param(jax.random.uniform(rngs.params(), shape, param_dtype, -bound, bound))
                        for shape in lstm_layer_shapes(features, layer)
                    ]
                )
                for layer in range(layers)
            ]
        )

    def __call__(self, graph: AnyBatch, features: jax.Array) -> jax.Array:
        """Returns the output of the LSTM for each graph, [graphs, 2 * width].

        Args:
          graph: see `set2set`.
          features: floating [nodes, width].
        """
        weights = [tuple(array[...] for array in layer) for layer in self.weights]
        return set2set(graph, features, weights, self.steps)  # pyright: ignore[reportArgumentType]
