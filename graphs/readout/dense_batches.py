"""Dense arrays of a batch: a row of places for the nodes of each graph, and a matrix for its edges; and back."""

import contextlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.readout.graph_features import graph_segments, rows_of
from jmp_train.graphs.structure import (
    DEFAULT_FORMATS,
    AnyBatch,
    Graph,
    as_count,
    batch,
    batch_of,
    check_known,
    checked_rows,
    from_edges,
    graph_mask,
    in_float32,
    incidence_of,
    upcast,
    upcast_integers,
)
from jmp_train.policies.pytrees import has_tracers


def to_dense_batch(graph: AnyBatch, feature: str | Floats, max_nodes: int | None = None) -> tuple[jax.Array, jax.Array]:
    """Returns the features of each graph's nodes in a row of its own, and a mask of the nodes.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      feature: the name of a feature of the nodes, or an array [nodes, ...].
      max_nodes: number of places for the nodes of a graph; None for the largest number of nodes, outside of jit.

    Returns:
      The features [graphs, max_nodes, ...], 0 for places without a node; and the mask, bool [graphs, max_nodes].
      Padding nodes have no place; under jit neither have nodes beyond `max_nodes`.

    Raises:
      ValueError: the feature is missing, or `max_nodes` is too small, outside of jit.
      TypeError: `graph` is not a graph, or `max_nodes` is not an integer, or None under jit.

    Example:
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([], [], 1), from_edges([], [], 2)])
      >>> dense, mask = to_dense_batch(pair, jnp.array([1.0, 3.0, 7.0]))
      >>> dense.tolist(), mask.tolist()
      ([[1.0, 0.0], [3.0, 7.0]], [[True, False], [True, True]])

    Reference: to_dense_batch of PyTorch Geometric, https://pyg.org.
    """
    graph = batch_of(graph)
    rows = rows_of(graph, "nodes", feature)
    width, places = _places(graph, max_nodes)
    shape = len(graph.n_node), width
    dense = jnp.zeros((shape[0] * width, *rows.shape[1:]), rows.dtype).at[places].set(rows, mode="drop")
    mask = jnp.zeros(shape[0] * width, bool).at[places].set(True, mode="drop")
    return dense.reshape(*shape, *rows.shape[1:]), mask.reshape(shape)


def from_dense_batch(graph: AnyBatch, dense: Floats) -> jax.Array:
    """Returns the rows of the nodes from their places in a dense batch; the inverse of `to_dense_batch`.

    Args:
      graph: a graph or a batch of ours or jraph's, padded or not.
      dense: an array [graphs, max_nodes, ...].

    Returns:
      [nodes, ...]; 0 for padding, and under jit for nodes without a place.

    Raises:
      ValueError: there is another number of graphs, or fewer places than nodes, outside of jit.
      TypeError: `graph` is not a graph.

    Example:
      >>> from jmp_train.graphs import batch, from_edges
      >>> pair = batch([from_edges([], [], 1), from_edges([], [], 2)])
      >>> from_dense_batch(pair, jnp.array([[1.0, 0.0], [3.0, 7.0]])).tolist()
      [1.0, 3.0, 7.0]
    """
    graph = batch_of(graph)
    array = checked_rows("dense", dense, len(graph.n_node), "graphs")
    if array.ndim < 2:
        raise ValueError(f"dense must have shape [graphs, max_nodes, ...], got shape {array.shape}")
    flat = array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])
    return flat.at[_places(graph, array.shape[1])[1]].get(mode="fill", fill_value=0)


def to_dense_adj(graph: AnyBatch, feature: str | Floats | None = None, max_nodes: int | None = None) -> jax.Array:
    """Returns the adjacency matrix of each graph, with parallel edges added up in float32.

    Args:
      graph: see `to_dense_batch`.
      feature: the name of a feature of the edges, or an array [edges, ...]; None for the number of edges.
      max_nodes: see `to_dense_batch`.

    Returns:
      [graphs, max_nodes, max_nodes, ...] in the feature's dtype, float32 for numbers of edges: the row is the
      sender's place, the column the receiver's. 0 where there is no edge.

    Raises:
      ValueError: see `to_dense_batch`; or the graph does not store single edges.
      TypeError: see `to_dense_batch`.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> to_dense_adj(from_edges([0, 1, 1], [1, 0, 0], 2)).tolist()
      [[[0.0, 1.0], [2.0, 0.0]]]

    Reference: to_dense_adj of PyTorch Geometric, https://pyg.org.
    """
    graph = batch_of(graph)
    ones = jnp.ones(graph.connections.receivers.num_edges, jnp.float32) if feature is None else feature
    rows = rows_of(graph, "edges", ones)
    width, places = _places(graph, max_nodes)
    count = len(graph.n_node) * width
    ends = (places.at[ids].get(mode="fill", fill_value=count) for ids in (graph.senders, graph.receivers))
    senders, receivers = (jnp.where(end < count, end, count) for end in ends)
    entries = jnp.where((senders < count) & (receivers < count), senders * width + receivers % max(width, 1), -1)
    segments = incidence_of(entries, count * width)
    dense = in_float32(lambda rows: segments.sum(upcast(upcast_integers(rows))), rows)
    return dense.reshape(len(graph.n_node), width, width, *rows.shape[1:])


def from_dense_adj(
    adjacency: ArrayLike, n_node: Sequence[int] | None = None, *, formats: Sequence[str] = DEFAULT_FORMATS
) -> Graph:
    """Returns the graph, or the batch of graphs, of adjacency matrices; runs on the host.

    Args:
      adjacency: [nodes, nodes] or [graphs, max_nodes, max_nodes]; each entry that is not 0 is an edge, from the row's
        node to the column's.
      n_node: int [graphs], number of nodes of each graph; None for `max_nodes`.
      formats: see `from_edges`.

    Returns:
      The graph, with the entries as the edge feature "w"; edges are sorted by sender, then receiver.

    Raises:
      TypeError: the adjacency is traced.
      ValueError: shapes do not fit, or an edge has an end beyond a graph's nodes.

    Example:
      >>> graph = from_dense_adj(np.array([[0.0, 1.0], [2.0, 0.0]]))
      >>> graph.senders.tolist(), graph.receivers.tolist(), graph.edges["w"].tolist()
      ([0, 1], [1, 0], [1.0, 2.0])

    Reference: dense_to_sparse of PyTorch Geometric, https://pyg.org.
    """
    check_known("adjacency", adjacency, "graphs are made outside of jit, and passed to it")
    array = np.asarray(adjacency)
    matrices = array[None] if array.ndim == 2 else array
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2]:
        raise ValueError(f"adjacency must be [graphs, max_nodes, max_nodes] or one such matrix, got {array.shape}")
    counts = [matrices.shape[1]] * len(matrices) if n_node is None else [as_count("n_node", n) for n in n_node]
    if len(counts) != len(matrices) or not len(matrices):
        raise ValueError(f"n_node must have one number for each of {len(matrices)} graphs, got {len(counts)}")
    found = []
    for place, (matrix, count) in enumerate(zip(matrices, counts, strict=True)):
        senders, receivers = np.nonzero(matrix)
        if len(senders) and max(senders.max(), receivers.max()) >= count:
            raise ValueError(f"adjacency[{place}] has an edge beyond its {count} nodes")
        found.append(from_edges(senders, receivers, count, edges={"w": matrix[senders, receivers]}, formats=formats))
    return found[0] if array.ndim == 2 else batch(found, formats=formats)


def _places(graph: Graph, max_nodes: int | None) -> tuple[int, jax.Array]:
    """Returns the number of places per graph, and the place of each node among those of all graphs, int32 [nodes].

    Nodes without a place have the number of all places.
    """
    is_known = not has_tracers((graph.n_node, graph.connections))
    if max_nodes is None and not is_known:
        raise TypeError("max_nodes is needed under jit: shapes cannot depend on the sizes of graphs")
    with jax.ensure_compile_time_eval() if is_known else contextlib.nullcontext():  # jit may close over a known graph
        if max_nodes is None:
            max_nodes = int(graph.n_node.max(where=graph_mask(graph), initial=0))
        width = as_count("max_nodes", max_nodes)
        segments, counts = graph_segments(graph, "nodes"), graph.n_node
        owners, starts = segments.ids, jnp.cumsum(counts) - counts
        places = jnp.arange(graph.num_nodes, dtype=jnp.int32) - starts[owners]
        has_place = segments.is_counted & (places < width)
        if is_known and (missing := (segments.is_counted & ~has_place)).any():
            node = int(missing.argmax())
            raise ValueError(f"max_nodes={width} is too small: a graph has more nodes, among them node {node}")
        return width, jnp.where(has_place, owners * width + places, len(counts) * width).astype(jnp.int32)
