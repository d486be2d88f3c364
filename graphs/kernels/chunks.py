"""Iteration over edges in chunks: values per edge exist for one chunk at a time.

On CPUs a chunk fits into the caches; on GPUs it is large enough to give all of them work.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure import CSR, CSRAndCSC, upcast
from jmp_train.policies import pvary
from jmp_train.policies.autocasting import opaque_to_autocast

Tree = TypeVar("Tree")
CPU_ELEMENTS = 2**17  # that a chunk of blocks makes: half a MiB
GPU_EDGES = 2**18
GPU_ELEMENTS = 2**25  # that a chunk makes at most: 128 MiB


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of blocks of edges, traced.

    Attributes:
      others: int32 [blocks, width], the node at each edge's other end; any node in empty places.
      is_edge: bool [blocks, width], False in empty places.
      nodes: int32 [blocks], the node at this end.
      positions: int32 [blocks, width], the places of the edges in `CSR.others`; any for empty ones.
    """

    others: jax.Array
    is_edge: jax.Array
    nodes: jax.Array
    positions: jax.Array

    def of_others(self, data: jax.Array) -> jax.Array:
        """Returns the rows [blocks, width, ...] at the other ends, of data [others, ...], upcast."""
        return upcast_at(data, self.others)

    def of_nodes(self, data: jax.Array) -> jax.Array:
        """Returns the rows [blocks, 1, ...] at this end, of data [nodes, ...], upcast."""
        return upcast_at(data, self.nodes)[:, None]

    def where_edge(self, data: jax.Array) -> jax.Array:
        """Returns data [blocks, width, ...] with 0 in empty places."""
        is_edge = self.is_edge.reshape(*self.is_edge.shape, *[1] * (data.ndim - 2))
        return jnp.where(is_edge, data, jnp.zeros_like(data))

    def sums_by_place(self, terms: Callable[..., Sequence[jax.Array]], *narrow: jax.Array) -> list[jax.Array]:
        """Returns the sums [blocks, ...] of wide terms.

        It adds one edge of each block at a time, so that the sums stay in registers.

        Args:
          terms: returns terms [blocks, 1, ...] of a chunk with one edge of each block, and of its part of `narrow`.
          *narrow: arrays [blocks, width, ...], which XLA would compute for each number of a term again.
        """
        terms, sums = jax.jit(terms), []
        count = len(jax.eval_shape(terms, self._place(0), *(x[:, :1] for x in narrow)))
        for term in range(count):
            # Each sum reads its rows anew: XLA would store those that two of them share.
            chunk = self if count == 1 else jax.lax.optimization_barrier(self)
            values = jax.lax.optimization_barrier(narrow) if narrow else ()
            total: Any = 0
            for place in range(self.others.shape[1]):
                one = chunk._place(place)
                total += one.where_edge(terms(one, *(x[:, place : place + 1] for x in values))[term])[:, 0]
            sums.append(total)
        return sums

    def _place(self, place: int) -> "Chunk":
        """Returns the chunk of one edge of each block."""
        others, is_edge, positions = (x[:, place : place + 1] for x in (self.others, self.is_edge, self.positions))
        return Chunk(others, is_edge, self.nodes, positions)

    def sum_of_others(self, data: jax.Array, weights: jax.Array | None) -> jax.Array:
        """Returns the sums [blocks, heads, width] of the rows of features [others, heads, width], upcast.

        Args:
          data: floating.
          weights: [blocks, width, heads] or [blocks, width, 1], 0 in empty places; None for 1.
        """
        if weights is None:
            return self.sums_by_place(lambda one: [one.of_others(data)])[0]
        return self.sums_by_place(lambda one, weights: [weights[..., None] * one.of_others(data)], weights)[0]

    def dot_with_others(self, others: jax.Array, nodes: jax.Array) -> jax.Array:
        """Returns the products [blocks, width, heads] of rows at both ends, summed over their width, in float32.

        Args:
          others: floating [others, heads, width].
          nodes: floating [nodes, heads, width].
        """
        return sum_of_rows(self.of_others(others) * self.of_nodes(nodes))


def pvary_alike(tree: Tree) -> Tree:
    """Returns arrays that, within a `shard_map`, all vary over the mesh axes over which one of them does.

    Then the loops' carries vary too, and jax adds the gradients of replicated arrays.
    """
    axes = {name for x in jax.tree.leaves(tree) for name in jax.typeof(x).manual_axis_type.varying}
    return pvary(tree, sorted(axes)) if axes else tree


def run_chunked(kernel: Callable[..., Tree], edges: CSRAndCSC | None, *arguments: Any) -> Tree:
    """Returns the result of a chunked kernel for edges and arguments in their dtypes.

    Args:
      kernel: a function of sorted edges and the arguments, with a gradient of its own.
      edges: edges sorted by either end.
      *arguments: pytrees of arrays.
    """
    assert edges is not None  # without them "xla" is chosen
    alike = pvary_alike((edges, *arguments))
    return opaque_to_autocast(kernel)(*alike)


def differentiated_in_float32(
    compute: Callable[..., Tree], derived: Callable[..., Tree] | None = None
) -> Callable[..., Tree]:
    """Returns a function of pytrees of arrays with the derivatives of another one, for upcast arrays.

    Through a loop, jax adds the gradients of an array in its own dtype, in which sums over many edges stagnate.

    Args:
      compute: the function.
      derived: a function with the same results, up to rounding; None for `compute`.
    """
    derived = compute if derived is None else derived
    computed = jax.custom_jvp(compute)

    @computed.defjvp
    def _(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Tree, Tree]:
        like = jax.eval_shape(compute, *primals)

        def stored(*arguments: Any) -> Tree:
            found = derived(*jax.tree.map(upcast, arguments))
            return jax.tree.map(lambda x, y: x.astype(y.dtype), found, like)

        return jax.jvp(stored, primals, tangents)

    return computed


@jax.custom_jvp
def sum_of_rows(data: jax.Array) -> jax.Array:
    """Returns data [..., width], upcast, summed over the width."""

    def by_product(data: jax.Array) -> jax.Array:  # which XLA vectorizes on CPUs, and its sum not
        ones = jnp.ones((data.shape[-1], 1), data.dtype)
        rows = data.reshape(-1, data.shape[-1])
        return jnp.matmul(rows, ones, precision="highest").reshape(data.shape[:-1])

    return jax.lax.platform_dependent(data, cpu=by_product, default=lambda data: data.sum(-1))


sum_of_rows.defjvp(lambda data, tangents: (sum_of_rows(*data), tangents[0].sum(-1)))


def at(data: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns an array's rows by ids that are in range."""
    return data.at[ids].get(mode="promise_in_bounds")


def upcast_at(data: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns an array's rows by ids that are in range, upcast.

    bfloat16 is upcast by its bits: XLA's own conversion is slow on CPUs without instructions for it.
    """
    if data.dtype != jnp.bfloat16:
        return upcast(at(data, ids))
    bits = at(jax.lax.bitcast_convert_type(data, jnp.uint16), ids).astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(bits << 16, jnp.float32)


def add_up(
    neighbors: CSR,
    compute: Callable[[Chunk], Sequence[jax.Array]],
    like: Sequence[jax.ShapeDtypeStruct],
    elements_per_block: int,
    after: Any,
) -> list[jax.Array]:
    """Returns the sums [nodes, ...] of the arrays of each node's blocks.

    Args:
      neighbors: the edges.
      compute: returns arrays [blocks, ...] for a chunk.
      like: shape and dtype of one block's part of each.
      elements_per_block: number of elements that `compute` holds per block, which sets the chunks' size on CPUs.
      after: arrays that `compute` needs. XLA would allocate the zeros of all passes at once, or keep one
        for all of them; these begin their life after those arrays.
    """
    zero = jax.lax.optimization_barrier((jnp.zeros(()), after))[0]
    shapes = [(neighbors.num_rows, *x.shape) for x in like]
    start = [jnp.broadcast_to(zero.astype(x.dtype), shape) for x, shape in zip(like, shapes, strict=True)]

    def add(sums: list[jax.Array], chunk: Chunk, step: Step) -> list[jax.Array]:
        rows = jax.lax.dynamic_slice_in_dim(neighbors.rows, step.first, step.size)
        rows = jnp.where(step.is_new, rows, neighbors.num_rows)
        return [total.at[rows].add(part, mode="drop") for total, part in zip(sums, compute(chunk), strict=True)]

    sums = _walk(neighbors, add, start, elements_per_block)
    return [joined(neighbors, total)[: neighbors.num_nodes] for total in sums]


def joined(neighbors: CSR, sums: jax.Array) -> jax.Array:
    """Returns the nodes' own rows plus the further ones."""
    first = neighbors.num_nodes
    for rows in neighbors.further:
        sums = sums.at[rows].add(sums[first : first + len(rows)], mode="promise_in_bounds")
        first += len(rows)
    # Or XLA copied the nodes' rows before it adds to them.
    return jax.lax.optimization_barrier(sums)


def largest(
    neighbors: CSR,
    compute: Callable[[Chunk], jax.Array],
    like: jax.ShapeDtypeStruct,
    elements_per_block: int,
) -> jax.Array:
    """Returns the largest [nodes, ...] of the arrays of each node's blocks; -inf or the least integer without blocks.

    Args:
      neighbors: see `add_up`.
      compute: returns an array [blocks, ...] for a chunk.
      like: see `add_up`.
      elements_per_block: see `add_up`.
    """

    def update(most: jax.Array, chunk: Chunk, step: Step) -> jax.Array:
        del step  # blocks that come twice do no harm
        return most.at[chunk.nodes].max(compute(chunk), indices_are_sorted=True)

    least = -jnp.inf if jnp.issubdtype(like.dtype, jnp.floating) else jnp.iinfo(like.dtype).min
    start = jnp.full((neighbors.num_nodes, *like.shape), least, like.dtype)
    return _walk(neighbors, update, start, elements_per_block)


def of_edges(
    neighbors: CSR,
    compute: Callable[[Chunk], jax.Array],
    like: jax.ShapeDtypeStruct,
    elements_per_block: int,
) -> jax.Array:
    """Returns the values of all edges [edges, ...], 0 for those that count nowhere.

    Args:
      neighbors: see `add_up`; edges must have places.
      compute: returns an array [blocks, width, ...] for a chunk.
      like: shape and dtype of one edge's value.
      elements_per_block: see `add_up`.
    """
    slots = neighbors.edge_slots
    shape = (neighbors.num_blocks, neighbors.width, *like.shape)

    def write(result: jax.Array, chunk: Chunk, step: Step) -> jax.Array:
        return jax.lax.dynamic_update_slice_in_dim(result, compute(chunk), step.first, 0)

    result = _walk(neighbors, write, jnp.zeros(shape, like.dtype), elements_per_block)
    result = result.reshape(-1, *like.shape)
    slots = jnp.where(slots < 0, result.shape[0], slots)
    return result.at[slots].get(mode="fill", fill_value=0)


def sum_of_chunks(
    neighbors: CSR,
    compute: Callable[[Chunk, jax.Array], Tree],
    like: Any,
    elements_per_block: int,
    after: Any,
) -> Tree:
    """Returns the compensated sums of the chunks' arrays.

    Args:
      neighbors: see `add_up`.
      compute: returns a tree of arrays for a chunk and a mask of the blocks that count, bool [blocks].
      like: their shapes and dtypes.
      elements_per_block: see `add_up`.
      after: see `add_up`.

    Reference: Knuth's exact difference of a sum, The Art of Computer Programming 2, 4.2.2.
    """
    zero = jax.lax.optimization_barrier((jnp.zeros(()), after))[0]
    start = jax.tree.map(lambda x: jnp.broadcast_to(zero.astype(x.dtype), x.shape), like)

    def add(carry: tuple[Tree, Tree], chunk: Chunk, step: Step) -> tuple[Tree, Tree]:
        totals, lost = carry
        parts = compute(chunk, step.is_new)
        sums = jax.tree.map(jnp.add, totals, parts)

        def rounded_off(total: jax.Array, part: jax.Array, result: jax.Array) -> jax.Array:
            added = result - total
            return (total - (result - added)) + (part - added)

        return sums, jax.tree.map(lambda rest, *x: rest + rounded_off(*x), lost, totals, parts, sums)

    return jax.tree.map(jnp.add, *_walk(neighbors, add, (start, start), elements_per_block))


def each_edge(
    neighbors: CSR,
    compute: Callable[[jax.Array, jax.Array, jax.Array], Sequence[jax.Array]],
    like: Sequence[jax.ShapeDtypeStruct],
    elements_per_edge: int,
) -> list[jax.Array]:
    """Returns the values of all edges [edges, ...] in the edges' order, 0 for those that count nowhere.

    Args:
      neighbors: the edges by the nodes that they enter; edges must have places.
      compute: returns arrays [some edges, ...] for int32 ids of edges, of their senders and of their receivers.
      like: shape of one edge's part of each array, and the stored dtype.
      elements_per_edge: number of elements that `compute` holds per edge, which sets the chunks' size on CPUs.
    """
    slots = neighbors.edge_slots
    count, width = neighbors.num_edges, neighbors.width
    start = [jnp.zeros((count, *x.shape), _bits_of(x.dtype)) for x in like]
    if neighbors.num_blocks == 0 or count == 0:
        return [x.astype(y.dtype) for x, y in zip(start, like, strict=True)]
    start = pvary_alike((start, neighbors))[0]

    def run(size: int, start: list[jax.Array]) -> list[jax.Array]:
        size = max(1, min(size, count))

        def iteration(index: jax.Array, results: list[jax.Array]) -> list[jax.Array]:
            first = jnp.minimum(index * size, count - size)
            slot = jax.lax.dynamic_slice_in_dim(slots, first, size)
            is_edge, (block, place) = slot >= 0, jnp.divmod(jnp.maximum(slot, 0), width)
            senders = at(neighbors.others, at(neighbors.starts, block) + place)
            ids = first + jnp.arange(size, dtype=jnp.int32)
            # Or XLA would look them up for each number of a row again on CPUs.
            ends = jax.lax.optimization_barrier((senders, at(neighbors.nodes, block)))
            written = []
            for result, rows, x in zip(results, compute(ids, *ends), like, strict=True):
                rows = jnp.where(is_edge.reshape(-1, *[1] * (rows.ndim - 1)), rows, jnp.zeros_like(rows))
                bits = jax.lax.bitcast_convert_type(rows.astype(x.dtype), result.dtype)
                written.append(jax.lax.dynamic_update_slice_in_dim(result, bits, first, 0))
            return written

        return jax.lax.fori_loop(0, -(-count // size), iteration, start)

    results = jax.lax.platform_dependent(
        start,
        cpu=functools.partial(run, CPU_ELEMENTS // elements_per_edge),
        default=functools.partial(run, GPU_EDGES),
    )
    return [jax.lax.bitcast_convert_type(x, y.dtype) for x, y in zip(results, like, strict=True)]


def _bits_of(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """Returns half precision as integers, because XLA copies a loop's whole half array in each iteration on CPUs."""
    return jnp.uint16 if jnp.dtype(dtype).itemsize == 2 else dtype


@dataclasses.dataclass(frozen=True)
class Step:
    """The blocks of a chunk: `size` blocks from `first` on; the last chunk may repeat some."""

    first: jax.Array
    size: int
    is_new: jax.Array


def _walk(
    neighbors: CSR,
    update: Callable[[Any, Chunk, Step], Any],
    start: Any,
    elements_per_block: int,
) -> Any:
    if neighbors.num_blocks == 0:
        return start
    start = pvary_alike((start, neighbors))[0]

    def run(size: int, start: Any) -> Any:
        size = max(1, min(size, neighbors.num_blocks))

        def iteration(index: jax.Array, carry: Any) -> Any:
            first = jnp.minimum(index * size, neighbors.num_blocks - size)
            step = Step(first, size, first + jnp.arange(size) >= index * size)
            return update(carry, _chunk(neighbors, first, size), step)

        return jax.lax.fori_loop(0, -(-neighbors.num_blocks // size), iteration, start)

    return jax.lax.platform_dependent(
        start,
        cpu=functools.partial(run, CPU_ELEMENTS // elements_per_block),
        default=functools.partial(run, min(GPU_EDGES // neighbors.width, GPU_ELEMENTS // elements_per_block)),
    )


def _chunk(neighbors: CSR, first: jax.Array, size: int) -> Chunk:
    starts, counts, nodes = (
        jax.lax.dynamic_slice_in_dim(array, first, size)
        for array in (neighbors.starts, neighbors.counts, neighbors.nodes)
    )
    places = jnp.arange(neighbors.width, dtype=jnp.int32)
    positions = jnp.minimum(starts[:, None] + places, neighbors.others.shape[0] - 1)
    return Chunk(at(neighbors.others, positions), places < counts[:, None], nodes, positions)
