"""Which rows edges read and add to, with sums that add in blocks, and reads whose gradients do.

The rows of a segment are added in blocks of at most 32, the blocks again in blocks, and so on, so that
rounding errors stay near 1e-6 of the terms' magnitudes however many there are: in float32 a running sum
of 100,000 equal numbers errs by 1e-4 of it, and one of 1,024 small ones beside a large one by 3e-5. A read
goes the same way backwards, first to the blocks and then to the rows, so that the gradient, which jax
derives, is added in blocks as well, in every order and under every transform.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from jmp_train.graphs.counts import check_int32

BLOCK = 32


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Incidence:
    """The segment of each edge: the node it leaves, or the node it enters.

    Where a segment has more than 32 edges, edges belong to blocks and blocks to segments: instead of the
    segments of the edges, their blocks are kept, so that this costs no further edge-long array.

    Attributes:
      rows: int [edges], the block of each edge, or its segment where there are no blocks; an index
        beyond the last one for edges that count nowhere.
      degrees: int32 [segments], how many edges each segment has.
      blocks: the segment of each block; None where there are no blocks.
      all_count: whether it is known that all edges count, which saves looking.
    """

    rows: jax.Array
    degrees: jax.Array
    blocks: "Incidence | FurtherBlocks | None" = None
    all_count: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return self.degrees.shape[0]

    @property
    def num_edges(self) -> int:
        """How many edges there are, those that count nowhere included."""
        return self.rows.shape[0]

    @property
    def num_rows(self) -> int:
        """How many blocks there are, or segments where there are no blocks."""
        return self.num_segments if self.blocks is None else self.blocks.num_edges

    @property
    def is_counted(self) -> jax.Array:
        """Bool [edges], whether an edge counts somewhere."""
        return self.rows < self.num_rows

    @property
    def ids(self) -> jax.Array:
        """Int [edges], the segment of each edge; the number of segments where it counts nowhere."""
        if self.blocks is None:
            return self.rows
        return self.blocks.ids.at[self.rows].get(mode="fill", fill_value=self.num_segments)

    def where(self, is_kept: jax.Array) -> "Incidence":
        """Returns the incidence in which only the edges of a mask, bool [edges], count."""
        degrees = jraph.segment_sum(is_kept.astype(jnp.int32), self.ids, self.num_segments)
        return Incidence(jnp.where(is_kept, self.rows, self.num_rows), degrees, self.blocks)

    def read(self, data: jax.Array) -> jax.Array:
        """Returns each edge's row [edges, ...] of data [segments, ...], wide; 0 where it has none."""
        if self.num_segments == 0:
            return jnp.zeros((self.num_edges, *data.shape[1:]), data.dtype)
        return self._of_rows(data if self.blocks is None else self.blocks.read(data))

    def sum(self, data: jax.Array) -> jax.Array:
        """Returns the sums [segments, ...] of data [edges, ...], wide."""
        if self.num_segments == 0:
            return jnp.zeros((0, *data.shape[1:]), data.dtype)
        sums = jraph.segment_sum(data, self.rows, self.num_rows)
        return sums if self.blocks is None else self.blocks.sum(sums)

    def mean(self, data: jax.Array) -> jax.Array:
        """Returns the means [segments, ...] of data [edges, ...], wide; 0 of segments without edges."""
        sizes = jnp.maximum(self.degrees, 1).astype(data.dtype)
        return self.sum(data) / rows_like(sizes, data)

    def max(self, data: jax.Array) -> jax.Array:
        """Returns the largest [segments, ...] of data [edges, ...]; -inf of segments without edges."""
        return jraph.segment_max(data, self.ids, self.num_segments)

    def min(self, data: jax.Array) -> jax.Array:
        """Returns the least [segments, ...] of data [edges, ...]; inf of segments without edges."""
        return jraph.segment_min(data, self.ids, self.num_segments)

    def softmax(self, logits: jax.Array) -> jax.Array:
        """Returns the softmax [edges, ...] of wide logits in each segment; 0 where all are -inf.

        Powers are taken of differences to the largest of their block, and blocks scaled afterwards.
        """
        if not self.all_count:
            logits = jnp.where(rows_like(self.is_counted, logits), logits, -jnp.inf)
        fixed = jax.lax.stop_gradient(logits)
        largest = _largest(fixed, self.rows, self.num_rows)
        powers = jnp.exp(logits - self._of_rows(finite_or_zero(largest)))
        sizes = jraph.segment_sum(powers, self.rows, self.num_rows)
        if self.blocks is None:
            return powers * self._of_rows(reciprocal(sizes))
        scales = jnp.exp(largest - self.blocks.read(finite_or_zero(self.blocks.max(largest))))
        total = self.blocks.sum(sizes * scales)
        return powers * self._of_rows(scales * self.blocks.read(reciprocal(total)))

    def _of_rows(self, table: jax.Array) -> jax.Array:
        """Returns the rows [edges, ...] of blocks, or of segments where there are no blocks; 0 for others."""
        if self.all_count:
            return table.at[self.rows].get(mode="promise_in_bounds")
        return table.at[self.rows].get(mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FurtherBlocks:
    """The segment of each block, where the first blocks are one for each segment, and further ones follow.

    It does what an `Incidence` of blocks does. Few segments need a further block, so that little is added.

    Attributes:
      segments: int32 [further blocks], those segments that have further blocks; the number of segments fills up.
      further: of each further block, the place of its segment there.
      num_segments: how many segments there are.
    """

    segments: jax.Array
    further: Incidence
    num_segments: int = dataclasses.field(metadata={"static": True})

    @property
    def num_edges(self) -> int:
        """How many blocks there are."""
        return self.num_segments + self.further.num_edges

    @property
    def ids(self) -> jax.Array:
        """Int32 [blocks], the segment of each block; the number of segments for those without edges."""
        own = jnp.arange(self.num_segments, dtype=jnp.int32)
        further = self.segments.at[self.further.ids].get(mode="fill", fill_value=self.num_segments)
        return jnp.concatenate([own, further])

    def read(self, data: jax.Array) -> jax.Array:
        """Returns each block's row [blocks, ...] of data [segments, ...]."""
        rows = self.further.read(data.at[self.segments].get(mode="fill", fill_value=0))
        # XLA would make the row of a block anew for each edge that reads it on CPUs.
        return jax.lax.optimization_barrier(jnp.concatenate([data, rows]))

    def sum(self, data: jax.Array) -> jax.Array:
        """Returns the sums [segments, ...] of data [blocks, ...]."""
        own, further = self._parts(jax.lax.optimization_barrier(data))
        return own.at[self.segments].add(self.further.sum(further), mode="drop")

    def max(self, data: jax.Array) -> jax.Array:
        """Returns the largest [segments, ...] of data [blocks, ...]."""
        own, further = self._parts(data)
        return own.at[self.segments].max(self.further.max(further), mode="drop")

    def _parts(self, data: jax.Array) -> tuple[jax.Array, jax.Array]:
        return data[: self.num_segments], data[self.num_segments :]


def _largest(data: jax.Array, ids: jax.Array, count: int) -> jax.Array:
    """Returns the largest [count, ...] of data [edges, ...] by ids; -inf where there are none."""
    if data.dtype != jnp.float32:
        return jraph.segment_max(data, ids, count)
    # As integers of the same order, for which XLA's maximum is three times as fast on CPUs.
    bits = jax.lax.bitcast_convert_type(data, jnp.int32)
    most = jraph.segment_max(_ordered(bits), ids, count)
    least = _ordered(jax.lax.bitcast_convert_type(jnp.float32(-jnp.inf), jnp.int32))
    return jax.lax.bitcast_convert_type(_ordered(jnp.maximum(most, least)), jnp.float32)


def _ordered(bits: jax.Array) -> jax.Array:
    """Returns the bits of float32 as integers of the same order, and the other way round."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def finite_or_zero(data: jax.Array) -> jax.Array:
    """Returns data with 0 for infinities, which largest logits have where all are masked."""
    return jnp.where(jnp.isfinite(data), data, jnp.zeros_like(data))


def reciprocal(data: jax.Array) -> jax.Array:
    """Returns 1 over data, 1 where they are 0."""
    return 1 / jnp.where(data == 0, jnp.ones_like(data), data)


def first_rows(rows: jax.Array, count: int) -> jax.Array:
    """Returns the first of some rows; where that is all, they themselves."""
    return rows if count == rows.shape[0] else rows[:count]


def rows_like(column: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a column [rows] with the axes that it needs beside an array [rows, ...]."""
    return column.reshape(-1, *[1] * (array.ndim - 1))


def incidence_of(ids: jax.Array, num_segments: int, *, is_sorted: bool = False) -> Incidence:
    """Returns the incidence of ids that may be traced.

    Args:
      ids: int [edges]; edges with an id out of range count nowhere.
      num_segments: how many segments there are.
      is_sorted: whether the ids ascend.
    """
    ids = jnp.clip(ids, -1, num_segments).astype(jnp.int32)
    if is_sorted:
        return _incidence(jnp, ids, num_segments, ids.shape[0])
    order = jnp.argsort(ids, stable=True)
    ascending = _incidence(jnp, ids[order], num_segments, ids.shape[0])
    rows = jnp.zeros_like(ids).at[order].set(ascending.rows)
    return dataclasses.replace(ascending, rows=rows)


def incidence_on_host(ids: np.ndarray, num_segments: int) -> Incidence:
    """Returns the incidence of ids that are known, with blocks only where they are needed.

    Args:
      ids: int [edges]; edges with an id out of range count nowhere.
      num_segments: how many segments there are.
    """
    ids = np.clip(ids, -1, num_segments).astype(np.int32)
    order = np.argsort(ids, stable=True)
    ids = ids[order]
    most = np.bincount(ids + 1, minlength=num_segments + 2)[1:-1].max(initial=0)
    ascending = _incidence(np, ids, num_segments, int(most))
    rows = np.empty_like(ids)
    rows[order] = ascending.rows
    all_count = bool(((ids >= 0) & (ids < num_segments)).all())
    incidence = dataclasses.replace(ascending, rows=rows, all_count=all_count)
    return jax.tree.map(jnp.asarray, incidence)


def fixed_incidence(ids: np.ndarray, num_segments: int) -> Incidence:
    """Returns the incidence of ids that are known, whose structure and shapes depend on the numbers alone.

    A segment of at most 32 edges is one block, and so its sums are those of `incidence_on_host` to the bit.

    Args:
      ids: int [edges]; edges with an id out of range count nowhere.
      num_segments: how many segments there are.
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


def padded_incidence(
    ids: np.ndarray, num_segments: int, num_edges: int, most: int | None = None
) -> Incidence:
    """Returns the incidence of ids that are known, of shapes that depend on the numbers alone.

    Args:
      ids: int [at most num_edges], all in range.
      num_segments: how many segments there are.
      num_edges: how many edges there are to be; those that are added count nowhere.
      most: no segment has more edges; None for `num_edges`.

    Returns:
      The incidence, its arrays in the host's memory.
    """
    padded = filled(ids, num_edges, num_segments)
    most = num_edges if most is None else most
    if ascends(padded):
        return _incidence(np, padded, num_segments, most)
    order = _sorting(padded, num_segments + 1)
    ascending = _incidence(np, padded[order], num_segments, most)
    rows = np.empty_like(padded)
    rows[order] = ascending.rows
    return dataclasses.replace(ascending, rows=rows)


def most_in_as_many_levels(most: int) -> int:
    """Returns the largest number of edges of a segment that takes no more levels of blocks.

    Args:
      most: such a number.

    Example:
      >>> most_in_as_many_levels(7), most_in_as_many_levels(100)
      (32, 991)
    """
    largest = BLOCK
    while largest < most:
        largest = (largest - 1) * BLOCK - 1  # the inverse of what `_incidence` hands down
    return largest


def filled(array: np.ndarray, length: int, value: int) -> np.ndarray:
    """Returns int32 [length]: an array, followed by a value."""
    result = np.full(length, value, np.int32)
    result[: len(array)] = array
    return result


def _sorting(ids: np.ndarray, count: int) -> np.ndarray:
    """Returns the places of ids in their order, as argsort; scipy counts, and so is faster."""
    from scipy.sparse import csc_array

    places, columns = np.arange(len(ids), dtype=np.int32), np.arange(len(ids) + 1, dtype=np.int32)
    return csc_array((places, ids, columns), shape=(count, len(ids))).tocsr().data


def ascends(ids: np.ndarray) -> bool:
    """Whether no number is less than the one before it."""
    return bool((ids[1:] >= ids[:-1]).all())


def _incidence(xp: Any, ids: Any, num_segments: int, most: int) -> Incidence:
    """Returns the incidence of ids that ascend.

    An edge's block is its segment plus its place divided by 32: both ascend, so that different pairs of
    these have different sums, and segments share no block.

    Args:
      xp: numpy or jax.numpy.
      ids: int32 [edges]; -1 and the number of segments where an edge counts nowhere.
      num_segments: how many segments there are.
      most: no segment has more edges.
    """
    starts = xp.searchsorted(ids, xp.arange(num_segments + 1, dtype=xp.int32)).astype(xp.int32)
    degrees = starts[1:] - starts[:-1]
    is_counted = (ids >= 0) & (ids < num_segments)
    if most <= BLOCK or num_segments == 0:
        return Incidence(xp.where(is_counted, ids, num_segments).astype(xp.int32), degrees)
    count = num_segments + (ids.shape[0] - 1) // BLOCK
    check_int32("blocks of edges are", count)
    places = xp.arange(ids.shape[0], dtype=xp.int32)
    rows = xp.where(is_counted, ids + places // BLOCK, count).astype(xp.int32)
    first_blocks = xp.arange(num_segments, dtype=xp.int32) + starts[:-1] // BLOCK
    owners = xp.searchsorted(first_blocks, xp.arange(count, dtype=xp.int32), side="right") - 1
    owners = xp.maximum(owners, 0).astype(xp.int32)  # the first blocks may be those of no segment
    return Incidence(rows, degrees, _incidence(xp, owners, num_segments, most // BLOCK + 2))
