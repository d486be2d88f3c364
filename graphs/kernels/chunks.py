"""Iteration over edges in chunks: values per edge exist for one chunk at a time.

On CPUs a chunk fits into the caches; on GPUs it is large enough to give all of them work.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

from jmp_train.graphs.structure import CSR, CSRAndCSC, upcast
from jmp_train.policies import pvary
from jmp_train.policies.autocasting import opaque_to_autocast

Tree = TypeVar("Tree")
CPU_ELEMENTS = 2**17  # that a chunk of blocks makes: half a MiB
GPU_EDGES = 2**18
GPU_ELEMENTS = 2**25  # that a chunk makes at most: 128 MiB
FEW = 256  # chunks, each of which adds to all that the edges share


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk of blocks of edges, traced. Empty places repeat an edge of their block, or of the first one.

    Attributes:
      others: int32 [blocks, width], the node at each edge's other end.
      is_edge: bool [blocks, width], False in empty places.
      is_new: bool [blocks], False for blocks that the chunk before had too.
      nodes: int32 [blocks], the node at this end.
      positions: int32 [blocks, width], the places of the edges in `CSR.others`.
      rows: int32 [blocks], the row to which a block is added; beyond the last one if it is not new.
      first: the chunk's first block.
    """

    others: jax.Array
    is_edge: jax.Array
    is_new: jax.Array
    nodes: jax.Array
    positions: jax.Array
    rows: jax.Array
    first: jax.Array

    def of_others(self, data: jax.Array) -> jax.Array:
        """Returns the rows [blocks, width, ...] at the other ends, of data [others, ...], upcast, 0 without an edge."""
        return self.where_edge(upcast_at(data, self.others))

    def where_edge(self, data: jax.Array, other: float = 0) -> jax.Array:
        """Returns data [blocks, width, ...] with another number in empty places."""
        is_edge = self.is_edge.reshape(*self.is_edge.shape, *[1] * (data.ndim - 2))
        return jnp.where(is_edge, data, jnp.asarray(other, data.dtype))


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


def sum_of_rows(data: jax.Array) -> jax.Array:
    """Returns data [..., width], upcast, summed over the width."""

    def by_product(data: jax.Array) -> jax.Array:  # which XLA vectorizes on CPUs, and its sum not
        ones = jnp.ones((data.shape[-1], 1), data.dtype)
        rows = data.reshape(-1, data.shape[-1])
        return jnp.matmul(rows, ones, precision="highest").reshape(data.shape[:-1])

    return jax.lax.platform_dependent(data, cpu=by_product, default=lambda data: data.sum(-1))


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


class Sums(NamedTuple):
    """Sums over edges, or their terms in a chunk, or their shapes.

    Attributes:
      rows: arrays [nodes, ...], or those of a chunk's blocks [blocks, ...], or of one block [...].
      whole: arrays to which all edges add.
    """

    rows: Sequence[Any] = ()
    whole: Sequence[Any] = ()


def add_up(
    neighbors: CSR, compute: Callable[[Chunk], Sums], like: Sums, elements_per_block: int, after: Any = ()
) -> Sums:
    """Returns the sums of the arrays of each node's blocks, and compensated sums of what all chunks add to.

    Args:
      neighbors: the edges.
      compute: returns the terms of a chunk. In those to which all edges add, blocks that are not new count nothing.
      like: shapes and dtypes of the terms of one block.
      elements_per_block: number of elements that `compute` holds per block, which sets the chunks' size on CPUs.
      after: arrays that `compute` needs. XLA would allocate the zeros of all passes at once, or keep one
        for all of them; these begin their life after those arrays.

    Reference: Knuth's exact difference of a sum, The Art of Computer Programming 2, 4.2.2.
    """
    zero = jax.lax.optimization_barrier((jnp.zeros(()), after))[0]

    def zeros(x: Any, *shape: int) -> jax.Array:
        return jnp.broadcast_to(zero.astype(x.dtype), (*shape, *x.shape))

    def add(sums: tuple[Any, ...], chunk: Chunk) -> tuple[Any, ...]:
        rows, whole, lost = sums
        terms = compute(chunk)
        rows = [x.at[chunk.rows].add(term, mode="drop") for x, term in zip(rows, terms.rows, strict=True)]
        totals = list(map(jnp.add, whole, terms.whole))
        return rows, totals, list(map(jnp.add, lost, map(rounded_off, whole, terms.whole, totals)))

    start = [zeros(x, neighbors.num_rows) for x in like.rows], *[[zeros(x) for x in like.whole] for _ in range(2)]
    rows, whole, lost = walk(neighbors, add, start, elements_per_block)
    return Sums([joined(neighbors, x)[: neighbors.num_nodes] for x in rows], list(map(jnp.add, whole, lost)))


def rounded_off(total: jax.Array, part: jax.Array, result: jax.Array) -> jax.Array:
    """Returns what a sum of two numbers lost."""
    added = result - total
    return (total - (result - added)) + (part - added)


def joined(neighbors: CSR, sums: jax.Array) -> jax.Array:
    """Returns the nodes' own rows plus the further ones."""
    first = neighbors.num_nodes
    for rows in neighbors.further:
        sums = sums.at[rows].add(sums[first : first + len(rows)], mode="promise_in_bounds")
        first += len(rows)
    # Or XLA copied the nodes' rows before it adds to them.
    return jax.lax.optimization_barrier(sums)


def of_edges(
    neighbors: CSR,
    compute: Callable[[Chunk], Sequence[jax.Array]],
    like: Sequence[Any],
    elements_per_block: int,
) -> list[jax.Array]:
    """Returns the values of all edges [edges, ...], 0 for those that count nowhere.

    Args:
      neighbors: see `add_up`; edges must have places.
      compute: returns arrays [blocks, width, ...] for a chunk.
      like: shapes and dtypes of one edge's values.
      elements_per_block: see `add_up`.
    """
    slots, blocks = neighbors.edge_slots, (neighbors.num_blocks, neighbors.width)

    def write(results: list[jax.Array], chunk: Chunk) -> list[jax.Array]:
        update = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=chunk.first, axis=0)
        return list(map(update, results, compute(chunk)))

    results = walk(neighbors, write, [jnp.zeros((*blocks, *x.shape), x.dtype) for x in like], elements_per_block)
    slots = jnp.where(slots < 0, blocks[0] * blocks[1], slots)
    return [x.reshape(-1, *x.shape[2:]).at[slots].get(mode="fill", fill_value=0) for x in results]


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
      like: shape and dtype of one edge's part of each array.
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


def walk(
    neighbors: CSR, update: Callable[[Any, Chunk], Any], start: Any, elements_per_block: int, *, are_few: bool = False
) -> Any:
    """Returns what is left of the start after it was updated by each chunk.

    Args:
      neighbors: the edges.
      update: returns the new values, given the old ones and a chunk.
      start: a tree of arrays.
      elements_per_block: see `add_up`.
      are_few: True for at most `FEW` chunks, where each adds to large arrays; they need not fit into the caches then.
    """
    if neighbors.num_blocks == 0:
        return start
    start = pvary_alike((start, neighbors))[0]

    def run(size: int, start: Any) -> Any:
        size = max(1, min(size, neighbors.num_blocks))

        def iteration(index: jax.Array, carry: Any) -> Any:
            first = jnp.minimum(index * size, neighbors.num_blocks - size)
            return update(carry, _chunk(neighbors, first, first + jnp.arange(size) >= index * size))

        return jax.lax.fori_loop(0, -(-neighbors.num_blocks // size), iteration, start)

    if are_few:
        return run(max(CPU_ELEMENTS // elements_per_block, -(-neighbors.num_blocks // FEW)), start)
    return jax.lax.platform_dependent(
        start,
        cpu=functools.partial(run, CPU_ELEMENTS // elements_per_block),
        default=functools.partial(run, min(GPU_EDGES // neighbors.width, GPU_ELEMENTS // elements_per_block)),
    )


def _chunk(neighbors: CSR, first: jax.Array, is_new: jax.Array) -> Chunk:
    starts, counts, nodes, rows = (
        jax.lax.dynamic_slice_in_dim(array, first, len(is_new))
        for array in (neighbors.starts, neighbors.counts, neighbors.nodes, neighbors.rows)
    )
    # Blocks without edges follow those with edges.
    places, is_empty = jnp.arange(neighbors.width, dtype=jnp.int32), counts == 0
    last = jnp.where(is_empty, neighbors.counts[0], counts)[:, None] - 1
    positions = jnp.where(is_empty, neighbors.starts[0], starts)[:, None] + jnp.minimum(places, jnp.maximum(last, 0))
    # Or XLA would look them up for each number of a row again on CPUs.
    others, positions = jax.lax.optimization_barrier((at(neighbors.others, positions), positions))
    return Chunk(
        others,
        places < counts[:, None],
        is_new,
        jnp.where(is_empty, neighbors.nodes[0], nodes),
        positions,
        jnp.where(is_new, rows, neighbors.num_rows),
        first,
    )
