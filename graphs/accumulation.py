"""Which rows edges read and add to, with sums that add in blocks, and reads whose gradients do.

The rows of a segment are added in blocks of at most 1,024, and then the blocks, so that rounding errors
do not grow with a segment's length: in float32 a running sum of 100,000 equal numbers errs by 1e-4 of
it. A read goes the same way backwards, first to the blocks and then to the rows, so that the
gradient, which jax derives, is added in blocks as well, in every order and under every transform.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jraph
import numpy as np

BLOCK = 1024


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Incidence:
    """The segment of each edge: the node it leaves, or the node it enters.

    Where a segment has more than 1,024 edges, edges belong to blocks and blocks to segments: instead of
    the segments of the edges, their blocks are kept, so that this costs no further edge-long array.

    Attributes:
      rows: int [edges], the block of each edge, or its segment where there are no blocks; an index
        beyond the last one for edges that count nowhere.
      owners: int [blocks], the segment of each block; None where there are no blocks.
      degrees: int32 [segments], how many edges each segment has.
    """

    rows: jax.Array
    owners: jax.Array | None
    degrees: jax.Array

    @property
    def num_segments(self) -> int:
        """How many segments there are."""
        return self.degrees.shape[0]

    @property
    def num_edges(self) -> int:
        """How many edges there are, those that count nowhere included."""
        return self.rows.shape[0]

    @property
    def is_counted(self) -> jax.Array:
        """Bool [edges], whether an edge counts somewhere."""
        return self.rows < (self.num_segments if self.owners is None else self.owners.shape[0])

    @property
    def ids(self) -> jax.Array:
        """Int [edges], the segment of each edge; the number of segments where it counts nowhere."""
        if self.owners is None:
            return self.rows
        return self.owners.at[self.rows].get(mode="fill", fill_value=self.num_segments)

    def where(self, is_kept: jax.Array) -> "Incidence":
        """Returns the incidence in which only the edges of a mask, bool [edges], count."""
        beyond = self.num_segments if self.owners is None else self.owners.shape[0]
        degrees = jraph.segment_sum(is_kept.astype(jnp.int32), self.ids, self.num_segments)
        return Incidence(jnp.where(is_kept, self.rows, beyond), self.owners, degrees)

    def read(self, data: jax.Array) -> jax.Array:
        """Returns each edge's row [edges, ...] of data [segments, ...], wide; 0 where it has none."""
        if self.num_segments == 0:
            return jnp.zeros((self.num_edges, *data.shape[1:]), data.dtype)
        table = data if self.owners is None else data[self.owners]
        return table.at[self.rows].get(mode="fill", fill_value=0)

    def sum(self, data: jax.Array) -> jax.Array:
        """Returns the sums [segments, ...] of data [edges, ...], wide."""
        if self.num_segments == 0:
            return jnp.zeros((0, *data.shape[1:]), data.dtype)
        if self.owners is None:
            return jraph.segment_sum(data, self.rows, self.num_segments)
        blocks = jraph.segment_sum(data, self.rows, self.owners.shape[0])
        return jraph.segment_sum(blocks, self.owners, self.num_segments, indices_are_sorted=True)

    def read_finely(self, data: jax.Array) -> jax.Array:
        """Returns what `read` does; its gradient is added as `sum_finely` adds."""
        # Two reads, so that the gradient is split before it is added, and not after.
        return _high(self.read(data)) + _low(self.read(data))

    def sum_finely(self, data: jax.Array) -> jax.Array:
        """Returns what `sum` does, closer; for what has few columns.

        The leading bits of all terms are added apart from the rest, and without rounding where the
        terms are of like size.
        """
        high, low = jnp.moveaxis(self.sum(jnp.stack([_high(data), _low(data)], axis=-1)), -1, 0)
        return high + low

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
        """Returns the softmax [edges, ...] of wide logits in each segment; 0 where all are -inf."""
        is_counted = rows_like(self.is_counted, logits)
        logits = jnp.where(is_counted, logits, jnp.full_like(logits, -jnp.inf))
        largest = self.max(jax.lax.stop_gradient(logits))
        largest = jnp.where(jnp.isfinite(largest), largest, jnp.zeros_like(largest))
        weights = jnp.exp(logits - self.read(largest))
        total = self.sum_finely(weights)
        inverse = 1 / jnp.where(total == 0, jnp.ones_like(total), total)
        return weights * self.read_finely(inverse)


def rows_like(column: jax.Array, array: jax.Array) -> jax.Array:
    """Returns a column [rows] with the axes that it needs beside an array [rows, ...]."""
    return column.reshape(-1, *[1] * (array.ndim - 1))


def _leading(data: jax.Array) -> jax.Array:
    """Returns data with half of its bits, the leading ones."""
    info = jnp.finfo(data.dtype)
    return jax.lax.reduce_precision(data, info.nexp, info.nmant // 2)


def _high(data: jax.Array) -> jax.Array:
    leading = _leading(data)
    return jnp.where(jnp.isfinite(leading), leading, data)


def _low(data: jax.Array) -> jax.Array:
    leading = _leading(data)
    return jnp.where(jnp.isfinite(leading), data - leading, jnp.zeros_like(data))


def incidence_of(ids: jax.Array, num_segments: int, *, is_sorted: bool = False) -> Incidence:
    """Returns the incidence of ids that may be traced.

    Args:
      ids: int [edges]; edges with an id out of range count nowhere.
      num_segments: how many segments there are.
      is_sorted: whether the ids ascend.
    """
    ids = jnp.clip(ids, -1, num_segments)
    if ids.shape[0] <= BLOCK:
        rows = jnp.where(ids < 0, num_segments, ids)
        ones = jnp.ones(ids.shape, jnp.int32)
        return Incidence(rows, None, jraph.segment_sum(ones, rows, num_segments))
    order = None if is_sorted else jnp.argsort(ids, stable=True)
    blocks, owners, degrees = _blocks(jnp, ids if order is None else ids[order], num_segments)
    rows = blocks if order is None else jnp.zeros_like(blocks).at[order].set(blocks)
    return Incidence(rows, owners, degrees)


def incidence_on_host(ids: np.ndarray, num_segments: int) -> Incidence:
    """Returns the incidence of ids that are known, with blocks only where they are needed.

    Args:
      ids: int [edges]; edges with an id out of range count nowhere.
      num_segments: how many segments there are.
    """
    ids = np.clip(ids, -1, num_segments).astype(np.int32)
    rows = np.where(ids < 0, num_segments, ids)
    degrees = np.bincount(rows, minlength=num_segments + 1)[:num_segments].astype(np.int32)
    if degrees.max(initial=0) <= BLOCK:
        return Incidence(jnp.asarray(rows), None, jnp.asarray(degrees))
    order = np.argsort(ids, stable=True)
    blocks, owners, _ = _blocks(np, ids[order], num_segments)
    rows[order] = blocks
    return Incidence(jnp.asarray(rows), jnp.asarray(owners), jnp.asarray(degrees))


def _blocks(xp: Any, ids: Any, num_segments: int) -> tuple[Any, Any, Any]:
    """Returns the block of each edge, the segment of each block, and the segments' degrees.

    An edge's block is its segment plus its place divided by 1,024: both ascend, so that different
    pairs of these have different sums, and segments share no block.

    Args:
      xp: numpy or jax.numpy.
      ids: int [edges], ascending; -1 and the number of segments where an edge counts nowhere.
      num_segments: how many segments there are.
    """
    count = num_segments + (ids.shape[0] - 1) // BLOCK
    places = xp.arange(ids.shape[0], dtype=xp.int32)
    is_valid = (ids >= 0) & (ids < num_segments)
    blocks = xp.where(is_valid, ids + places // BLOCK, count).astype(xp.int32)
    starts = xp.searchsorted(ids, xp.arange(num_segments + 1, dtype=xp.int32)).astype(xp.int32)
    first_blocks = xp.arange(num_segments, dtype=xp.int32) + starts[:-1] // BLOCK
    owners = xp.searchsorted(first_blocks, xp.arange(count, dtype=xp.int32), side="right") - 1
    owners = xp.maximum(owners, 0).astype(xp.int32)  # the first blocks may be those of no segment
    return blocks, owners, starts[1:] - starts[:-1]
