"""Sorts edges by the nodes at one end, found by counting, and builds the incidences of edges and nodes.

The ids of an incidence are traced, or known on the host; its shapes depend on degrees or only on counts.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.array_types import Ids
from jmp_train.graphs.structure.counts import LARGEST_COUNT, check_int32
from jmp_train.graphs.structure.feature_arrays import on_device
from jmp_train.graphs.structure.incidence import BLOCK, FurtherBlocks, Incidence


def filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """Returns int32 [length]: an array padded with a value."""
    result = np.full(length, value, np.int32)
    result[: len(array)] = array
    return result


def ranges(starts: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns the numbers from each start on, `counts` of them, one after the other."""
    before = np.cumsum(counts) - counts
    return np.arange(int(counts.sum())) + np.repeat(starts - before, counts)


def places_of(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns int32 [count]: the place of each number among distinct ids; -1 for other numbers."""
    places = np.full(count, -1, np.int32)
    places[ids] = np.arange(len(ids), dtype=np.int32)
    return places


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


def as_int32_ids(name: str, ids: Ids) -> jax.Array:
    """Returns ids of any integer dtype as int32; those beyond it are -1 or its largest number, and no other ids.

    Args:
      name: the argument's name, for the message.
      ids: integers, of NumPy in any size, whose upper bits JAX would drop.

    Raises:
      TypeError: they are not integers.
    """
    array: Any = ids if isinstance(ids, jax.Array | np.ndarray | np.generic) else jnp.asarray(ids)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be integers, got {array.dtype}")
    limits = jnp.iinfo(array.dtype)
    if limits.max > LARGEST_COUNT:
        xp: Any = jnp if isinstance(array, jax.Array) else np
        array = xp.clip(array, max(limits.min, -1), LARGEST_COUNT)
    return on_device(array, np.int32)


def incidence_of(ids: jax.Array, num_segments: int, *, is_sorted: bool = False) -> Incidence:
    """Returns the incidence of ids that may be traced.

    Args:
      ids: int [edges]; edges with an id out of range do not count.
      num_segments: number of segments.
      is_sorted: whether the ids ascend.
    """
    ids = jnp.clip(as_int32_ids("ids", ids), -1, num_segments)
    if is_sorted:
        return _incidence(jnp, ids, num_segments, ids.shape[0])
    order = jnp.argsort(ids, stable=True)
    ascending = _incidence(jnp, ids[order], num_segments, ids.shape[0])
    rows = jnp.zeros_like(ids).at[order].set(ascending.rows)
    return dataclasses.replace(ascending, rows=rows)


def incidence_on_host(order: EdgeOrder) -> Incidence:
    """Returns the incidence of known edges, with blocks only if they are needed.

    Args:
      order: the edges by the nodes that are the segments; those with a node out of range do not count.
    """
    most = order.degrees.max(initial=0)
    incidence = _in_blocks(np, order.ids, order.places, order.starts, int(most))
    return jax.device_put(dataclasses.replace(incidence, all_count=order.has_all_nodes))


def fixed_incidence(ids: np.ndarray, num_segments: int) -> Incidence:
    """Returns the incidence of known ids, with structure and shapes that depend only on the counts.

    A segment of at most 32 edges is one block, so its sums equal those of `incidence_on_host` bitwise.

    Args:
      ids: int [edges]; edges with an id out of range do not count.
      num_segments: number of segments.
    """
    return jax.device_put(_fixed_incidence(ids, num_segments))


def _fixed_incidence(ids: Any, num_segments: int) -> Incidence:
    is_counted = (ids >= 0) & (ids < num_segments)
    ids = np.where(is_counted, ids, num_segments).astype(np.int32)
    degrees: Any = np.bincount(ids, minlength=num_segments + 1)[:num_segments].astype(np.int32)
    num_further = (len(ids) - 1) // BLOCK
    if num_further < 1:
        return Incidence(ids, degrees)
    check_int32("blocks of edges are", num_segments + num_further)
    order = np.argsort(ids, kind="stable")
    owners = ids[order]
    places = np.arange(len(ids)) - np.searchsorted(owners, owners)
    is_further = (places >= BLOCK) & (owners < num_segments)
    is_first = is_further & (places % BLOCK == 0)
    blocks = np.where(is_further, num_segments - 1 + np.cumsum(is_first), owners)
    rows: Any = np.empty_like(ids)
    rows[order] = np.where(owners < num_segments, blocks, num_segments + num_further)
    several, places = np.unique(owners[is_first], return_inverse=True)
    segments: Any = filled(several, num_further, num_segments)
    further = _fixed_incidence(filled(places, num_further, num_further), num_further)
    blocks = FurtherBlocks(segments, further, num_segments)
    return Incidence(rows, degrees, blocks)


def padded_incidence(ids: np.ndarray, num_segments: int, num_edges: int, most: int | None = None) -> Incidence:
    """Returns the incidence of known ids, with shapes that depend only on the counts.

    Args:
      ids: int [at most num_edges], all in range.
      num_segments: number of segments.
      num_edges: number of edges; the added ones do not count.
      most: largest number of edges per segment; None for `num_edges`.

    Returns:
      The incidence, its arrays in the host's memory.
    """
    padded = filled(ids, num_edges, num_segments)
    most = num_edges if most is None else most
    if ascends(padded):
        return _incidence(np, padded, num_segments, most)
    order, ordered, _ = counting_sort(padded, num_segments + 1, padded)
    ascending = _incidence(np, ordered, num_segments, most)
    rows = np.empty_like(padded)
    rows[order] = ascending.rows
    return dataclasses.replace(ascending, rows=rows)


def most_in_as_many_levels(most: int) -> int:
    """Returns the largest number of edges per segment that needs no more levels of blocks than a given one.

    Args:
      most: the given number.

    Example:
      >>> most_in_as_many_levels(7), most_in_as_many_levels(100)
      (32, 991)
    """
    largest = BLOCK
    while largest < most:
        largest = (largest - 1) * BLOCK - 1  # the inverse of the reduction in `_incidence`
    return largest


def _incidence(xp: Any, ids: Any, num_segments: int, most: int) -> Incidence:
    """Returns the incidence of ascending ids.

    Args:
      xp: numpy or jax.numpy.
      ids: int32 [edges]; -1 and the number of segments for edges that do not count.
      num_segments: number of segments.
      most: largest number of edges per segment.
    """
    starts = xp.searchsorted(ids, xp.arange(num_segments + 1, dtype=xp.int32)).astype(xp.int32)
    return _in_blocks(xp, ids, xp.arange(ids.shape[0], dtype=xp.int32), starts, most)


def _in_blocks(xp: Any, ids: Any, places: Any, starts: Any, most: int) -> Incidence:
    """Returns the incidence of ids with known places in order.

    An edge's block is its segment plus its place divided by 32. Both ascend in order, so different pairs
    have different sums, and segments share no block.

    Args:
      xp: numpy or jax.numpy.
      ids: int32 [edges]; -1 and the number of segments for edges that do not count.
      places: int32 [edges], the place of each edge in order.
      starts: int32 [segments + 1], the place at which each segment's edges begin, and at which the last one's end.
      most: largest number of edges per segment.
    """
    num_segments, num_edges = starts.shape[0] - 1, ids.shape[0]
    degrees = starts[1:] - starts[:-1]
    is_counted = (ids >= 0) & (ids < num_segments)
    if most <= BLOCK or num_segments == 0:
        return Incidence(xp.where(is_counted, ids, num_segments).astype(xp.int32), degrees)
    count = num_segments + (num_edges - 1) // BLOCK
    check_int32("blocks of edges are", count)
    rows = xp.where(is_counted, ids + places // BLOCK, count).astype(xp.int32)
    first_blocks = xp.arange(num_segments, dtype=xp.int32) + starts[:-1] // BLOCK
    owners = xp.searchsorted(first_blocks, xp.arange(count, dtype=xp.int32), side="right") - 1
    owners = xp.maximum(owners, 0).astype(xp.int32)  # the first blocks may belong to no segment
    return Incidence(rows, degrees, _incidence(xp, owners, num_segments, most // BLOCK + 2))
