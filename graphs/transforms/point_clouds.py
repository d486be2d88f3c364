"""Graphs of nearby points, found by scipy's k-d trees in float64; on the host."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure import Graph, as_count, ascends, from_edges
from jmp_train.policies.pytrees import has_tracers

Pairs = tuple[np.ndarray, np.ndarray]  # senders and receivers


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
      by distance, then sender. Among points at equal distance, any may be the last one taken.

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
        distances, found = KDTree(some).query(some, k=wanted)
        receivers = np.repeat(np.arange(len(some)), wanted)
        senders, distances = np.ravel(found), np.ravel(distances)
        if exclude_self:  # if many points are equal, a point need not be among its own nearest
            is_self = (senders == receivers).reshape(-1, wanted)
            is_self[~is_self.any(axis=1), -1] = True
            keep = ~is_self.ravel()
            senders, receivers, distances = senders[keep], receivers[keep], distances[keep]
        order = np.lexsort((senders, distances, receivers))
        return senders[order], receivers[order]

    return _connected(points, graph_ids, nearest, formats)


def radius_graph(
    points: ArrayLike,
    radius: float,
    graph_ids: Ids | None = None,
    *,
    self_loop: bool = False,
    formats: Sequence[str] = ("coo", "csr"),
) -> Graph:
    """Returns the graph in which points at most a radius apart send to each other; runs on the host.

    Args:
      points: floating [points, dimensions], finite; distances are Euclidean.
      radius: the largest distance.
      graph_ids: see `knn_graph`.
      self_loop: True to let each point send to itself.
      formats: see `from_edges`.

    Returns:
      The graph, a batch with `graph_ids`, without features; each edge in both directions, sorted by receiver, then
      sender.

    Raises:
      TypeError: see `knn_graph`.
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

    def near(some: np.ndarray) -> Pairs:
        from scipy.spatial import KDTree

        pairs = KDTree(some).query_pairs(radius, output_type="ndarray") if len(some) else np.empty((0, 2), np.int64)
        own = np.arange(len(some) if self_loop else 0)
        senders = np.concatenate([pairs[:, 0], pairs[:, 1], own])
        receivers = np.concatenate([pairs[:, 1], pairs[:, 0], own])
        order = np.lexsort((senders, receivers))
        return senders[order], receivers[order]

    return _connected(points, graph_ids, near, formats)


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
    counts = {"n_node": jnp.asarray(n_node, jnp.int32), "n_edge": jnp.asarray(n_edge, jnp.int32)}
    return dataclasses.replace(graph, **counts)


def _checked_points(points: ArrayLike) -> np.ndarray:
    """Returns float64 [points, dimensions]."""
    if has_tracers(points):
        raise TypeError("points is traced: search near points outside of jit")
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
    if has_tracers(graph_ids):
        raise TypeError("graph_ids is traced: search near points outside of jit")
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
