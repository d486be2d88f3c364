"""Incidence of edges and nodes: gathers and segment sums, forward and backward in blocks; extremes of segments.

The rows of a segment are summed in blocks of at most 32, the blocks again in blocks, and so on. So
rounding errors stay near 1e-6 of the terms' magnitudes for any number of terms. In float32, a running sum
of 100,000 equal terms has a relative error of 1e-4, and one of 1,024 small terms next to a large one of 3e-5. A read
uses the same levels backward, first the blocks and then the rows, so that jax's derivative of it is also
summed in blocks, in every order and under every transform.

The gradients of extremes reach what was reduced, however XLA rounds it. XLA may compute an operand of two operations
twice, and contract one of the products to a fused multiply-add: then no element equals the extreme. jax's own gradients
of `max` would be 0 or NaN.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.structure.feature_arrays import finite_or_zero, moments_about, reciprocal, rows_like

BLOCK = 32


@functools.partial(jax.jit, static_argnames="other", inline=True)  # one program outside of jit too
def _read_or(other: int, data: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns the rows of data, and another number for rows out of range."""
    return data.at[rows].get(mode="fill", fill_value=other)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Incidence:
    """The segment of each edge: the node it leaves, or the node it enters.

    If a segment has more than 32 edges, edges belong to blocks and blocks to segments. Then the blocks of the edges are
    stored instead of their segments, so that this takes no additional edge-long array.

    Attributes:
      rows: int [edges], the block of each edge, or its segment if there are no blocks; an index
        beyond the last one for edges that do not count.
      degrees: int32 [segments], number of edges of each segment.
      blocks: the segment of each block; None if there are no blocks.
      all_count: whether all edges are known to count, which saves a check.
    """

    rows: jax.Array
    degrees: jax.Array
    blocks: "Incidence | FurtherBlocks | None" = None
    all_count: bool = dataclasses.field(default=False, metadata={"static": True})

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return self.degrees.shape[0]

    @property
    def num_edges(self) -> int:
        """Number of edges, including those that do not count."""
        return self.rows.shape[0]

    @property
    def num_rows(self) -> int:
        """Number of blocks, or of segments if there are no blocks."""
        return self.num_segments if self.blocks is None else self.blocks.num_edges

    @property
    def is_counted(self) -> jax.Array:
        """Bool [edges], whether an edge counts."""
        return self.rows < self.num_rows

    @property
    def ids(self) -> jax.Array:
        """Int [edges], the segment of each edge; the number of segments if it does not count."""
        if self.blocks is None:
            return self.rows
        return _read_or(self.num_segments, self.blocks.ids, self.rows)

    def where(self, is_kept: jax.Array) -> "Incidence":
        """Returns the incidence in which only the edges of a mask, bool [edges], count."""
        degrees = jraph.segment_sum(is_kept.astype(jnp.int32), self.ids, self.num_segments)
        return Incidence(jnp.where(is_kept, self.rows, self.num_rows), degrees, self.blocks)

    def read(self, data: jax.Array) -> jax.Array:
        """Returns each edge's row [edges, ...] of data [segments, ...], upcast; 0 for edges that do not count."""
        if self.num_segments == 0:
            return jnp.zeros((self.num_edges, *data.shape[1:]), data.dtype)
        return self._of_rows(data if self.blocks is None else self.blocks.read(data))

    def sum(self, data: jax.Array) -> jax.Array:
        """Returns the sums [segments, ...] of data [edges, ...], upcast."""
        if self.num_segments == 0:
            return jnp.zeros((0, *data.shape[1:]), data.dtype)
        sums = jraph.segment_sum(data, self.rows, self.num_rows)
        return sums if self.blocks is None else self.blocks.sum(sums)

    def mean(self, data: jax.Array) -> jax.Array:
        """Returns the means [segments, ...] of data [edges, ...], upcast; 0 for segments without edges."""
        sizes = jnp.maximum(self.degrees, 1).astype(data.dtype)
        return self.sum(data) / rows_like(sizes, data)

    def counted(self, data: jax.Array) -> jax.Array:
        """Returns data [edges, ...] with 0 for edges that do not count, whose NaN would enter gradients."""
        if self.all_count:
            return data
        return jnp.where(rows_like(self.is_counted, data), data, jnp.zeros_like(data))

    def moments(self, data: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the means and variances [segments, ...] of data [edges, ...], upcast; 0 without edges."""
        data = self.counted(data)
        shift = jax.lax.stop_gradient(self.mean(data))
        rest = data - self.read(shift)
        return moments_about(shift, self.mean(rest), self.mean(rest * rest))

    def softmax_sum(self, data: jax.Array, temperature: jax.Array | float) -> jax.Array:
        """Returns the sums [segments, ...] of data [edges, ...], upcast, weighted by its softmax."""
        data = self.counted(data)
        return self.sum(self.softmax(data * temperature) * data)

    def max(self, data: jax.Array) -> jax.Array:
        """Returns the largest [segments, ...] of data [edges, ...]; -inf for segments without edges."""
        return jraph.segment_max(data, self.ids, self.num_segments)

    def min(self, data: jax.Array) -> jax.Array:
        """Returns the smallest [segments, ...] of data [edges, ...]; inf for segments without edges."""
        return jraph.segment_min(data, self.ids, self.num_segments)

    def argmax(self, data: jax.Array) -> jax.Array:
        """Returns the first edges, int32 [segments, ...], with the largest data [edges, ...]; -1 without edges."""
        return self._first_equal(data, self.max(data))

    def argmin(self, data: jax.Array) -> jax.Array:
        """Returns the first edges, int32 [segments, ...], with the smallest data [edges, ...]; -1 without edges."""
        return self._first_equal(data, self.min(data))

    def _first_equal(self, data: jax.Array, extreme: jax.Array) -> jax.Array:
        """Returns the first edge of each segment whose data equal the segment's extreme, or are both NaN."""
        data, extreme = jax.lax.stop_gradient((data, extreme))
        wanted = self.read(extreme)
        is_found = equal_or_nan(data, wanted)
        places = rows_like(jnp.arange(self.num_edges, dtype=jnp.int32), data)
        first = jraph.segment_min(jnp.where(is_found, places, self.num_edges), self.ids, self.num_segments)
        return jnp.where(first < self.num_edges, first, -1)

    def cumsum(self, data: jax.Array, *, exclusive: bool = False, reverse: bool = False) -> jax.Array:
        """Returns the sums [edges, ...] of data, upcast, up to each edge of its segment; 0 for edges that do not count.

        It sums pairs, pairs of pairs and so on, so that no number is a long sequential sum.

        Args:
          data: [edges, ...].
          exclusive: True to leave out an edge's own data.
          reverse: True to sum from the last edge to the first.
        """
        order = jnp.argsort(self.ids, stable=True)
        ids, rows = self.ids[order], data.at[order].get(mode="promise_in_bounds", unique_indices=True)
        is_first = jnp.concatenate([jnp.ones(1, bool), ids[1:] != ids[:-1]])[: self.num_edges]
        is_last = jnp.concatenate([is_first[1:], jnp.ones(1, bool)])[: self.num_edges]
        start = is_last if reverse else is_first
        if exclusive:
            before = jnp.roll(rows, -1 if reverse else 1, axis=0)
            rows = jnp.where(rows_like(start, rows), jnp.zeros_like(rows), before)
        sums = _segmented_sums(rows, start, reverse)
        sums = jnp.where(rows_like(ids < self.num_segments, sums), sums, jnp.zeros_like(sums))
        return jnp.zeros_like(sums).at[order].set(sums, unique_indices=True)

    def softmax(self, logits: jax.Array) -> jax.Array:
        """Returns the softmax [edges, ...] of float32 logits in each segment; 0 if all are -inf.

        Exponentials are taken of differences to the largest logit of their block, and blocks are scaled afterward.
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
        """Returns the rows [edges, ...] of blocks, or of segments if there are no blocks; 0 for others."""
        if self.all_count:
            return table.at[self.rows].get(mode="promise_in_bounds")
        return table.at[self.rows].get(mode="fill", fill_value=0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FurtherBlocks:
    """The segment of each block, where the first blocks are one per segment, and further ones follow.

    It replaces an `Incidence` of blocks. Few segments need a further block, so few rows are added.

    Attributes:
      segments: int32 [further blocks], the segments with further blocks, filled up with the number of segments.
      further: for each further block, the place of its segment in `segments`.
      num_segments: number of segments.
    """

    segments: jax.Array
    further: Incidence
    num_segments: int = dataclasses.field(metadata={"static": True})

    @property
    def num_edges(self) -> int:
        """Number of blocks."""
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
        # Without it, XLA would compute the row of a block again for each edge that reads it, on CPUs.
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
    """Returns the largest [count, ...] of data [edges, ...] by ids; -inf if there are none."""
    if data.dtype != jnp.float32:
        return jraph.segment_max(data, ids, count)
    # As integers of the same order, because XLA's maximum of integers is three times as fast on CPUs.
    bits = jax.lax.bitcast_convert_type(data, jnp.int32)
    most = jraph.segment_max(_ordered(bits), ids, count)
    least = _ordered(jax.lax.bitcast_convert_type(jnp.float32(-jnp.inf), jnp.int32))
    return jax.lax.bitcast_convert_type(_ordered(jnp.maximum(most, least)), jnp.float32)


def _ordered(bits: jax.Array) -> jax.Array:
    """Converts the bits of float32 to integers of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


def _segmented_sums(rows: jax.Array, is_start: jax.Array, reverse: bool) -> jax.Array:
    """Returns running sums of rows [edges, ...] that start again at True in a mask, bool [edges]."""

    def join(left: tuple[jax.Array, jax.Array], right: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        (has_start, total), (starts, more) = left, right
        return has_start | starts, jnp.where(rows_like(starts, more), more, total + more)

    return jax.lax.associative_scan(join, (is_start, rows), reverse=reverse)[1]


@jax.custom_jvp
def computed_once(data: jax.Array) -> jax.Array:
    """Returns data to scatter, of which the gradient may tell which are the largest of their segment.

    GPUs compute what is behind a barrier once; CPUs what is scattered.
    """
    return data


computed_once.defjvp(lambda data, tangents: (jax.lax.optimization_barrier(*data), tangents[0]))


def are_largest(data: jax.Array, axis: int) -> jax.Array:
    """Returns a mask of the data that are the largest along an axis: at least one, found in one pass; NaN is NaN."""
    winner = jnp.argmax(data, axis, keepdims=True)
    is_winner = jax.lax.broadcasted_iota(winner.dtype, data.shape, axis % data.ndim) == winner
    return is_winner | equal_or_nan(data, data.max(axis, keepdims=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest_over(data: jax.Array, axis: int) -> jax.Array:
    """Returns the largest data along an axis, which share the gradient equally."""
    return data.max(axis)


@largest_over.defjvp
def _largest_tangent(axis: int, data: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    is_largest, (slope,) = are_largest(jax.lax.stop_gradient(data[0]), axis), tangents
    count = is_largest.sum(axis, dtype=jnp.int32).astype(slope.dtype)
    return largest_over(data[0], axis), jnp.where(is_largest, slope, jnp.zeros_like(slope)).sum(axis) / count


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def extreme_of_two(is_max: bool, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the larger or the smaller of two numbers, with half the gradient of each if they are equal."""
    return jnp.maximum(left, right) if is_max else jnp.minimum(left, right)


@extreme_of_two.defjvp
def _tangent_of_two(
    is_max: bool, data: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (left, right), (of_left, of_right) = data, tangents
    is_left, is_right = (left > right, left < right) if is_max else (left < right, left > right)
    slope = jnp.where(is_left, of_left, jnp.where(is_right, of_right, (of_left + of_right) / 2))
    return extreme_of_two(is_max, left, right), slope


def equal_or_nan(data: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns where data are equal to `wanted`, or both are NaN."""
    return (data == wanted) | (jnp.isnan(data) & jnp.isnan(wanted))
