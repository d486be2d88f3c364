"""Graphs of nearby points, found by scipy's k-d trees in float64; on the host."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import (
    Graph,
    as_count,
    ascends,
    check_known,
    from_edges,
    on_device,
    reciprocal,
    root_or_zero,
    upcast,
)

Pairs = tuple[np.ndarray, np.ndarray]  # senders and receivers
SAME = 1e-9  # relative difference up to which a tree's distances may be equal
ROWS = 256  # points whose ties are resolved at a time


def knn_graph(
    points: ArrayLike,
    k: int,
    graph_ids: Ids | None = None,
    *,
    exclude_self: bool = False,
    formats: Sequence[str] = ("coo", "csr"),
) -> Graph:
    """Returns the graph in which the `k` nearest points send to each point; runs on the host.

    Args:
      points: floating [points, dimensions], finite; distances are Euclidean.
      k: number of senders per point; all points of a graph with fewer.
      graph_ids: int [points], ascending, the graph of a batch to which each point belongs; only points of one graph are
        connected. None for one graph.
      exclude_self: True to exclude a point from its own nearest points.
      formats: see `from_edges`.

    Returns:
      The graph, a batch with `graph_ids`, without features; its edges are sorted by receiver, and those of a receiver
      by distance, then sender, the point itself first. So of points at equal distance in float64, those that come first
      are taken.

    Raises:
      TypeError: points are not floating or traced, ids are not integers, or `k` is not an integer.
      ValueError: points do not have two axes or are not finite, ids do not ascend or have another length, or `k` is
        negative.

    Example:
      >>> import numpy as np
      >>> graph = knn_graph(np.array([[0.0], [1.0], [3.0]]), 1, exclude_self=True)
      >>> graph.senders.tolist(), graph.receivers.tolist()
      ([1, 0, 1], [0, 1, 2])

    Reference: dgl.knn_graph of Deep Graph Library, https://www.dgl.ai; Maneewongvatana and Mount, It's okay to be
    skinny, if your friends are fat, 1999, the trees.
    """
    as_count("k", k)

    def nearest(some: np.ndarray) -> Pairs:
        from scipy.spatial import KDTree

        wanted = min(k + exclude_self, len(some))
        if wanted == 0:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        tree = KDTree(some)
        distances, found = (
            np.asarray(each).reshape(len(some), -1) for each in tree.query(some, k=min(wanted + 1, len(some)))
        )
        last = distances[:, wanted - 1] * (1 + SAME)
        # If the next point is as near as the last one, all that are as near are compared.
        is_tied = (distances[:, -1] <= last) & (wanted < len(some))
        senders, receivers = [found[~is_tied, :wanted].ravel()], [np.repeat(np.flatnonzero(~is_tied), wanted)]
        for rows in np.array_split(np.flatnonzero(is_tied), 1 + is_tied.sum() // ROWS):
            near = tree.query_ball_point(some[rows], last[rows])
            senders += [np.asarray(each, np.int64) for each in near]
            receivers.append(np.repeat(rows, [len(each) for each in near]))
        return _nearest_of(some, np.concatenate(senders), np.concatenate(receivers), k, exclude_self)

    return _connected(points, graph_ids, nearest, formats)


def radius_graph(
    points: ArrayLike,
    radius: float,
    graph_ids: Ids | None = None,
    *,
    self_loop: bool = False,
    max_neighbors: int | None = None,
    formats: Sequence[str] = ("coo", "csr"),
) -> Graph:
    """Returns the graph in which points at most a radius apart send to each other; runs on the host.

    Args:
      points: floating [points, dimensions], finite; distances are Euclidean.
      radius: the largest distance.
      graph_ids: see `knn_graph`.
      self_loop: True to let each point send to itself, as its nearest point.
      max_neighbors: the largest number of senders per point, the nearest ones; of points at equal distance in float64,
        those that come first. None for all.
      formats: see `from_edges`.

    Returns:
      The graph, a batch with `graph_ids`, without features; each edge in both directions unless `max_neighbors` leaves
      one out, sorted by receiver, then sender.

    Raises:
      TypeError: see `knn_graph`; or `max_neighbors` is not an integer.
      ValueError: see `knn_graph`; or the radius is negative or NaN.

    Example:
      >>> import numpy as np
      >>> graph = radius_graph(np.array([[0.0], [1.0], [3.0]]), 1.5)
      >>> graph.senders.tolist(), graph.receivers.tolist()
      ([1, 0], [0, 1])

    Reference: dgl.radius_graph of Deep Graph Library, https://www.dgl.ai.
    """
    if not radius >= 0:
        raise ValueError(f"radius={radius} must be at least 0")
    most = None if max_neighbors is None else as_count("max_neighbors", max_neighbors)

    def near(some: np.ndarray) -> Pairs:
        from scipy.spatial import KDTree

        pairs = KDTree(some).query_pairs(radius, output_type="ndarray") if len(some) else np.empty((0, 2), np.int64)
        own = np.arange(len(some) if self_loop else 0)
        senders = np.concatenate([pairs[:, 0], pairs[:, 1], own])
        receivers = np.concatenate([pairs[:, 1], pairs[:, 0], own])
        if most is not None:
            senders, receivers = _nearest_of(some, senders, receivers, most)
        order = np.lexsort((senders, receivers))
        return senders[order], receivers[order]

    return _connected(points, graph_ids, near, formats)


def edge_lengths(graph: Graph, points: ArrayLike, *, normalize: bool = False) -> jax.Array:
    """Returns the distance between the points at both ends of each edge, for `with_edges`; under jit or not.

    Args:
      graph: a graph; padding edges have length 0.
      points: floating [nodes, dimensions], which have gradients; that of length 0 is 0.
      normalize: True to divide by the largest length, unless it is 0.

    Returns:
      [edges, 1] in the points' dtype, computed in at least float32.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> edge_lengths(from_edges([0, 1], [1, 1], 2), jnp.array([[0.0, 0.0], [3.0, 4.0]])).tolist()
      [[5.0], [0.0]]

    Reference: PyTorch Geometric's Distance.
    """
    points, adjacency = jnp.asarray(points), graph.connections
    rows = upcast(points)
    differences = adjacency.senders.read(rows) - adjacency.receivers.read(rows)
    is_edge = adjacency.receivers.is_counted & adjacency.senders.is_counted
    lengths = root_or_zero(jnp.where(is_edge, (differences * differences).sum(-1), 0))[:, None]
    if normalize:
        lengths = lengths * reciprocal(lengths.max(initial=0))
    return lengths.astype(points.dtype)


def _nearest_of(
    points: np.ndarray, senders: np.ndarray, receivers: np.ndarray, k: int, exclude_self: bool = False
) -> Pairs:
    """Returns the pairs of each receiver with its `k` nearest senders, sorted by receiver, distance and sender."""
    if exclude_self:
        is_kept = senders != receivers
        senders, receivers = senders[is_kept], receivers[is_kept]
    distances = np.linalg.norm(points[senders] - points[receivers], axis=1)
    distances[senders == receivers] = -1  # a point is nearest to itself, even if others are equal
    order = np.lexsort((senders, distances, receivers))
    senders, receivers = senders[order], receivers[order]
    is_near = np.arange(len(receivers)) - np.searchsorted(receivers, receivers) < k
    return senders[is_near], receivers[is_near]


def _connected(
    points: ArrayLike, graph_ids: Ids | None, connect: Callable[[np.ndarray], Pairs], formats: Sequence[str]
) -> Graph:
    """Returns the graph of the edges that a function finds among the points of each graph of a batch."""
    array = _checked_points(points)
    n_node = np.array([len(array)]) if graph_ids is None else _sizes(graph_ids, len(array))
    senders, receivers, n_edge = [np.empty(0, np.int64)], [np.empty(0, np.int64)], []
    for start, count in zip(np.cumsum(n_node) - n_node, n_node, strict=True):
        found = connect(array[start : start + count])
        senders.append(found[0] + start)
        receivers.append(found[1] + start)
        n_edge.append(len(found[0]))
    graph = from_edges(np.concatenate(senders), np.concatenate(receivers), len(array), formats=formats)
    counts = {"n_node": on_device(n_node, np.int32), "n_edge": on_device(np.array(n_edge), np.int32)}
    return dataclasses.replace(graph, **counts)


def _checked_points(points: ArrayLike) -> np.ndarray:
    """Returns float64 [points, dimensions]."""
    check_known("points", points, "search near points outside of jit")
    array = points if isinstance(points, jax.Array) else np.asarray(points)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"points must be floating, got {array.dtype}")
    if array.ndim != 2:
        raise ValueError(f"points must have shape [points, dimensions], got shape {array.shape}")
    array = np.asarray(array).astype(np.float64)
    is_finite = np.isfinite(array).all(axis=1)
    if not is_finite.all():
        raise ValueError(f"points[{is_finite.argmin()}] is not finite")
    return array


def _sizes(graph_ids: Ids, count: int) -> np.ndarray:
    """Returns the number of points of each graph, int64 [graphs]."""
    check_known("graph_ids", graph_ids, "search near points outside of jit")
    ids = np.asarray(graph_ids)
    ids = ids if ids.size else ids.astype(np.int32)  # an empty list is float64
    if not np.issubdtype(ids.dtype, np.integer):
        raise TypeError(f"graph_ids must be integers, got {ids.dtype}")
    if ids.shape != (count,):
        raise ValueError(f"graph_ids must have shape ({count},), one for each point, got shape {ids.shape}")
    if len(ids) and (ids[0] < 0 or not ascends(ids)):
        raise ValueError("graph_ids must ascend from 0: the points of a graph must be adjacent")
    if len(ids) and ids[-1] >= max(2 * count, 2**16):
        raise ValueError(f"graph_ids has {ids[-1]}, far more graphs than the {count} points")
    return np.bincount(ids)
