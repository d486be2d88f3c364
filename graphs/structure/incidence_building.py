"""Builds incidences of ids that are traced, or known on the host, with shapes that depend on degrees or counts."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.structure.counts import check_int32
from jmp_train.graphs.structure.edge_order import EdgeOrder, ascends, counting_sort, filled
from jmp_train.graphs.structure.incidence import BLOCK, FurtherBlocks, Incidence


def incidence_of(ids: jax.Array, num_segments: int, *, is_sorted: bool = False) -> Incidence:
    """Returns the incidence of ids that may be traced.

    Args:
      ids: int [edges]; edges with an id out of range do not count.
      num_segments: number of segments.
      is_sorted: whether the ids ascend.
    """
    ids = jnp.clip(ids, -1, num_segments).astype(jnp.int32)
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
    return jax.tree.map(jnp.asarray, dataclasses.replace(incidence, all_count=order.has_all_nodes))


def fixed_incidence(ids: np.ndarray, num_segments: int) -> Incidence:
    """Returns the incidence of known ids, with structure and shapes that depend only on the counts.

    A segment of at most 32 edges is one block, so its sums equal those of `incidence_on_host` bitwise.

    Args:
      ids: int [edges]; edges with an id out of range do not count.
      num_segments: number of segments.
    """
    return jax.tree.map(jnp.asarray, _fixed_incidence(ids, num_segments))


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
