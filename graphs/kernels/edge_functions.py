"""Reductions of any function of an edge, chunk by chunk, differentiated by jax, without storing messages.

A chunk is some blocks of edges; the edges of a block enter one node (`CSR`). The gradient recomputes a chunk's edges.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import joined, pvary_alike
from jmp_train.graphs.kernels.edge_reads import (
    NO_SINKS,
    NONE,
    EdgeBlocks,
    EdgeIds,
    in_chunks,
    is_edge_of,
    pass_on,
    read_all,
    sinks_of,
)
from jmp_train.graphs.kernels.edge_terms import Inputs
from jmp_train.graphs.structure import (
    CSR,
    NOT_APART,
    CSRAndCSC,
    are_largest,
    equal_or_nan,
    largest_over,
    rows_like,
    upcast,
)

_NOTHING: Mapping[Any, jax.Array] = {}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def largest_of_blocks(count: int, nodes: jax.Array, values: jax.Array, ties: jax.Array) -> jax.Array:
    """Returns the largest [nodes, ...] of values [chunks, blocks, ...], -inf without blocks.

    Blocks share the gradient by the number of their edges with that value. It works on one chunk at a time; otherwise
    XLA would allocate several arrays as long as the blocks.

    Args:
      count: number of nodes.
      nodes: int32 [chunks, blocks]; beyond the last one for blocks that count nowhere.
      values: the values of the blocks.
      ties: the numbers of edges that have them.
    """
    del ties
    return _largest_by_node(count, nodes, values)


def _by_node(
    update: Callable[[Any, jax.Array], jax.Array], start: jax.Array, nodes: jax.Array, values: jax.Array
) -> jax.Array:
    """Returns the reduction [nodes, ...] of values [chunks, blocks, ...], one chunk at a time.

    Args:
      update: returns the updated array for `at[rows]` of the old one and values.
      start: the initial array.
      nodes: see `largest_of_blocks`.
      values: see `largest_of_blocks`.
    """

    def add(rows: jax.Array, chunk: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        nodes, values = chunk
        return update(rows.at[nodes], values.astype(rows.dtype)), None

    return jax.lax.scan(add, pvary_alike((start, nodes, values))[0], (nodes, values))[0]


def _largest_by_node(count: int, nodes: jax.Array, values: jax.Array) -> jax.Array:
    start = jnp.full((count, *values.shape[2:]), -jnp.inf, values.dtype)
    return _by_node(lambda rows, new: rows.max(new, mode="drop", indices_are_sorted=True), start, nodes, values)


def _is_extreme(nodes: jax.Array, values: jax.Array, extreme: jax.Array) -> jax.Array:
    """Returns a mask of the values [blocks, ...] that equal those of their node; NaN equals NaN."""
    return equal_or_nan(values, extreme.at[nodes].get(mode="clip"))


def _largest_forward(
    count: int, nodes: jax.Array, values: jax.Array, ties: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    most: Any = largest_of_blocks(count, nodes, values, ties)  # ties share second derivatives too

    def kept(chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        nodes, values, ties = chunk
        return jnp.where(_is_extreme(nodes, values, most), ties, jnp.zeros_like(ties))

    return most, (nodes, jax.lax.map(kept, (nodes, values, ties)))


def _largest_backward(
    count: int, saved: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[None, jax.Array, None]:
    nodes, ties = saved
    start = jnp.zeros((count, *gradient.shape[1:]), upcast(gradient).dtype)
    total = _by_node(lambda rows, new: rows.add(new, mode="drop", indices_are_sorted=True), start, nodes, ties)
    share, dtype = upcast(gradient) / jnp.maximum(total, 1), gradient.dtype

    def write(index: jax.Array, rows: jax.Array) -> jax.Array:
        weights = ties[index].astype(share.dtype)
        part = (share.at[nodes[index]].get(mode="clip") * weights).astype(dtype)
        return jax.lax.dynamic_update_index_in_dim(rows, part, index, 0)

    # These begin their life after what was saved: XLA would keep the same zeros for the values' scan and for this.
    zero = jax.lax.optimization_barrier((jnp.zeros((), dtype), ties))[0]
    rows = pvary_alike((jnp.broadcast_to(zero, ties.shape), saved, share))[0]
    return None, jax.lax.fori_loop(0, len(nodes), write, rows), None


largest_of_blocks.defvjp(_largest_forward, _largest_backward)


def first_of_blocks(count: int, nodes: jax.Array, values: jax.Array, first: jax.Array) -> jax.Array:
    """Returns the first edges, int32 [nodes, ...], that have the largest of their node; -1 without edges."""
    most = _largest_by_node(count, nodes, values)
    first = jnp.where(_is_extreme(nodes, values, most), first, NONE)
    start = jnp.full((count, *first.shape[2:]), NONE, jnp.int32)
    first = _by_node(lambda rows, new: rows.min(new, mode="drop", indices_are_sorted=True), start, nodes, first)
    return jnp.where(first == NONE, -1, first)


class Terms(NamedTuple):
    """The terms of edges to reduce, floating [edges, ...] by name.

    Attributes:
      sums: terms to add, in at least float32.
      largest: terms to maximize.
      first: terms of which to find the first edge with the largest.
      bounds: terms to maximize without a gradient.
    """

    sums: Mapping[Any, jax.Array] = _NOTHING
    largest: Mapping[Any, jax.Array] = _NOTHING
    first: Mapping[Any, jax.Array] = _NOTHING
    bounds: Mapping[Any, jax.Array] = _NOTHING


class Reduced(NamedTuple):
    """The reductions of `Terms` per node, [nodes, ...] by name.

    Attributes:
      sums: sums; 0 for nodes without edges.
      largest: maxima; 0 for nodes without edges; ties share the gradient equally.
      first: int32, the first edge that has the largest term; -1 for nodes without edges.
      bounds: maxima; -inf for nodes without edges.
    """

    sums: dict[Any, jax.Array]
    largest: dict[Any, jax.Array]
    first: dict[Any, jax.Array]
    bounds: dict[Any, jax.Array]


Function = Callable[[Inputs, EdgeIds], Terms]


class _Parts(NamedTuple):
    """The reductions of `Terms` per block, [blocks, ...] by name.

    Attributes:
      sums: the sum of each block.
      largest: the maximum of each block and the number of edges that have it, as uint8.
      first: the largest, and the first edge that has it.
      bounds: the largest.
    """

    sums: dict[Any, jax.Array]
    largest: dict[Any, tuple[jax.Array, jax.Array]]
    first: dict[Any, tuple[jax.Array, jax.Array]]
    bounds: dict[Any, jax.Array]


class _Totals(NamedTuple):
    """The reductions of the chunks so far: sums [rows, ...] and bounds [nodes, ...]."""

    sums: dict[Any, jax.Array]
    bounds: dict[Any, jax.Array]


class _Sinks(NamedTuple):
    """Unread arrays that collect the gradients of the inputs and of closed-over arrays."""

    inputs: Inputs
    shared: list[jax.Array]


def reduce_edges(
    edges: CSRAndCSC, function: Function, inputs: Inputs, elements: int, *, has_gradient: bool = True
) -> Reduced:
    """Returns the reductions of a function over the edges that enter each node.

    Args:
      edges: the edges, at least one block.
      function: a function of one edge, traced more than once; floating arrays that it closes over have gradients.
      inputs: the arrays that it reads, by name; it gets their rows in their own dtypes.
      elements: largest number of elements that it reads or returns per edge, which sets the chunks' size.
      has_gradient: True if the result has a gradient.
    """
    edges, inputs = pvary_alike(jax.tree.map(jnp.asarray, (edges, inputs)))
    neighbors, chunks = edges.by_target, in_chunks(edges.by_target, elements)
    fixed, one = jax.lax.stop_gradient((inputs, jax.tree.map(lambda x: x[0], chunks)))
    pure, shared = jax.closure_convert(function, *read_all(edges, one, fixed, NO_SINKS)[0])
    if not has_gradient:
        inputs, shared = jax.lax.stop_gradient((inputs, shared))
    fixed_shared = jax.lax.stop_gradient(shared)

    @jax.checkpoint
    def of_chunk(sinks: _Sinks, chunk: EdgeBlocks) -> tuple[_Parts, _Sinks]:
        (rows, ids), of_inputs = read_all(edges, chunk, fixed, sinks.inputs)
        passed = [pass_on(x, sink) for x, sink in zip(fixed_shared, sinks.shared, strict=True)]
        parts = _parts_of(pure(rows, ids, *[x for x, _ in passed]), is_edge_of(neighbors, chunk), ids.edges)
        return parts, _Sinks(of_inputs, [sink for _, sink in passed])

    def add(carry: tuple[_Totals, _Sinks], chunk: EdgeBlocks) -> tuple[tuple[_Totals, _Sinks], _Parts]:
        totals, sinks = carry
        parts, sinks = of_chunk(sinks, chunk)
        sums = {name: x.at[chunk.rows].add(parts.sums[name], mode="drop") for name, x in totals.sums.items()}
        bounds = {name: x.at[chunk.nodes].max(parts.bounds[name], mode="drop") for name, x in totals.bounds.items()}
        return (_Totals(sums, bounds), sinks), parts._replace(sums={}, bounds={})

    sinks = _Sinks(sinks_of(edges, inputs), [upcast(x) for x in shared])
    like, _ = jax.eval_shape(of_chunk, sinks, one)
    start = _Totals(
        {name: jnp.zeros((neighbors.num_rows, *x.shape[1:]), x.dtype) for name, x in like.sums.items()},
        {name: jnp.full((neighbors.num_nodes, *x.shape[1:]), -jnp.inf, x.dtype) for name, x in like.bounds.items()},
    )
    start = pvary_alike((start, inputs, shared, edges))[0]
    (totals, _), stacked = jax.lax.scan(add, (start, sinks), chunks)
    nodes = chunks.nodes  # those of blocks behind the last one are beyond the last node
    count = neighbors.num_nodes
    most: dict[Any, Any] = {name: largest_of_blocks(count, nodes, *x) for name, x in stacked.largest.items()}
    return Reduced(
        {name: joined(neighbors, x)[:count] for name, x in totals.sums.items()},
        {name: _zero_without_edges(neighbors, x) for name, x in most.items()},
        {name: first_of_blocks(count, nodes, *x) for name, x in stacked.first.items()},
        totals.bounds,
    )


def _parts_of(terms: Terms, is_edge: jax.Array, ids: jax.Array | None) -> _Parts:
    """Returns the reductions per block of terms [blocks * width, ...].

    Args:
      terms: the terms of the edges.
      is_edge: bool [blocks, width].
      ids: int32 [blocks * width], the ids of the edges.
    """

    def of_edges(rows: jax.Array, other: float) -> tuple[jax.Array, jax.Array]:
        rows = rows.reshape(*is_edge.shape, *rows.shape[1:])
        mask = is_edge.reshape(*is_edge.shape, *[1] * (rows.ndim - 2))
        return jnp.where(mask, rows, jnp.asarray(other, rows.dtype)), mask

    def largest(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the largest of each block, and how many edges have it, at least 1 and at most 32."""
        rows, mask = of_edges(rows, -jnp.inf)
        most = largest_over(rows, 1)
        is_most = mask & equal_or_nan(*jax.lax.stop_gradient((rows, most[:, None])))
        return most, jnp.maximum(is_most.sum(1, dtype=jnp.uint8), 1)  # XLA may round both in other ways

    def with_first(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        if ids is None:
            raise ValueError(NOT_APART)
        rows, mask = of_edges(jax.lax.stop_gradient(rows), -jnp.inf)
        is_most = mask & are_largest(rows, 1)
        places = ids.reshape(*is_edge.shape, *[1] * (is_most.ndim - 2))
        return rows.max(1), jnp.where(is_most, places, NONE).min(1)

    return _Parts(
        {name: of_edges(x, 0)[0].sum(1) for name, x in terms.sums.items()},
        {name: largest(x) for name, x in terms.largest.items()},
        {name: with_first(x) for name, x in terms.first.items()},
        {name: of_edges(jax.lax.stop_gradient(x), -jnp.inf)[0].max(1) for name, x in terms.bounds.items()},
    )


def _zero_without_edges(neighbors: CSR, rows: jax.Array) -> jax.Array:
    return jnp.where(rows_like(neighbors.degrees > 0, rows), rows, jnp.zeros_like(rows))
