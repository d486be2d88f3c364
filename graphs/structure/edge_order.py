"""The order of edges by the nodes at one end, found by counting."""

import dataclasses
import functools

import numpy as np


def filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """Returns int32 [length]: an array padded with a value."""
    result = np.full(length, value, np.int32)
    result[: len(array)] = array
    return result


def ascends(ids: np.ndarray) -> bool:
    """Returns whether no number is less than the one before it."""
    return bool((ids[1:] >= ids[:-1]).all())


def counting_sort(ids: np.ndarray, count: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the stable argsort of ids, the values in that order, and the count of each id.

    scipy counts in linear time: it converts a sparse matrix with one entry per column from columns to rows.

    Args:
      ids: int32, from 0 to below `count`.
      count: number of possible ids.
      values: an array of the same length.

    Returns:
      The places, int32; the values; and the counts, int64 [count].
    """
    from scipy.sparse import csc_array

    columns = np.arange(len(ids) + 1, dtype=np.int32)
    rows = csc_array((values, ids, columns), shape=(count, len(ids))).tocsr()
    return rows.indices.astype(np.int32, copy=False), rows.data, np.diff(rows.indptr).astype(np.int64)


@dataclasses.dataclass(frozen=True)
class EdgeOrder:
    """The edges in the order of the nodes at one end; edges of one node keep their given order.

    Edges with a node out of range come first if its id is -1, and last if it is `num_nodes`.

    Attributes:
      ids: int32 [edges], the node at this end, from -1 to `num_nodes`.
      others: int32 [edges], the node at the other end, from -1 to `num_others`.
      edges: int32 [edges], the edge at each place; None if they were given in order.
      sorted_others: int32 [edges], the other ends in that order.
      counts: int64 [num_nodes + 2], number of edges with each id, from -1 on.
      num_nodes: number of nodes at this end.
      num_others: number of nodes at the other end.
    """

    ids: np.ndarray
    others: np.ndarray
    edges: np.ndarray | None
    sorted_others: np.ndarray
    counts: np.ndarray
    num_nodes: int
    num_others: int

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.ids)

    @property
    def has_all_nodes(self) -> bool:
        """True if all nodes at this end are in range."""
        return not self.counts[[0, -1]].any()

    @property
    def all_count(self) -> bool:
        """True if both nodes of all edges are in range."""
        return self.has_all_nodes and _in_range(self.others, self.num_others)

    @property
    def degrees(self) -> np.ndarray:
        """Int64 [nodes], number of edges with each node at this end."""
        return self.counts[1:-1]

    @functools.cached_property
    def places(self) -> np.ndarray:
        """Int32 [edges], the place of each edge."""
        places = np.arange(self.num_edges, dtype=np.int32)
        if self.edges is None:
            return places
        result = np.empty_like(places)
        result[self.edges] = places
        return result

    @property
    def starts(self) -> np.ndarray:
        """Int32 [nodes + 1], the place at which each node's edges begin, and at which the last node's end."""
        return np.cumsum(self.counts)[:-1].astype(np.int32)


def edge_order(ids: np.ndarray, others: np.ndarray, num_nodes: int, num_others: int) -> EdgeOrder:
    """Returns the order of edges by `ids`, in linear time.

    Args:
      ids: int32 [edges], the node at this end, from -1 to `num_nodes`.
      others: int32 [edges], the node at the other end.
      num_nodes: number of nodes at this end.
      num_others: number of nodes at the other end.
    """
    count = num_nodes + 2
    if ascends(ids):  # copied, because the caller may change the array
        edges, sorted_others, counts = None, others.copy(), np.bincount(ids + 1, minlength=count)
    else:
        edges, sorted_others, counts = counting_sort(ids + 1, count, others)
    return EdgeOrder(ids, others, edges, sorted_others, counts, num_nodes, num_others)


def clipped_ids(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns ids as int32, those out of range as -1 or the number of nodes."""
    if not _in_range(ids, count):
        ids = np.clip(ids, -1, count)
    return ids.astype(np.int32, copy=False)


def _in_range(ids: np.ndarray, count: int) -> bool:
    return len(ids) == 0 or bool(ids.min() >= 0 and ids.max() < count)
