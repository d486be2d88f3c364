"""Sums and extremes over edges of a function of one edge, without storing what the function makes.

The function reads rows at the ends of an edge, the edge's own row and what all edges share, and its terms are added at
any of these four. The gradient of such a sum is another one, of the function's own gradient. So reverse derivatives of
every order consist of such sums, and only the gradients of edge data are as long as the edges.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.block_reductions import BlockReduction, least_of
from jmp_train.graphs.kernels.chunks import Chunk, each_edge, of_edges, walk
from jmp_train.graphs.kernels.edge_programs import (
    NARROW,
    EdgeIds,
    Edges,
    Ends,
    Function,
    Program,
    into,
    size_of,
    traced,
)
from jmp_train.graphs.kernels.flat_sums import flat_sums
from jmp_train.graphs.structure import CSR, accumulation_dtype, equal_or_nan, rows_like, upcast

_Saved = tuple[Edges, Ends, Ends]
# Makes the terms of a block at an end, given its name, the sums over the block, and the node's rows.
Finish = Callable[[str, Any, Any, Any], Any]


def edge_sums(function: Function, edges: Edges, fixed: Ends, inputs: Ends) -> Ends:
    """Returns the sums of a function's terms at the nodes and over all edges, in at least float32, and those of edges.

    Args:
      function: a function of one edge.
      edges: the edges, at least one.
      fixed: arrays without gradients.
      inputs: floating arrays.
    """
    found: Any = _differentiable(function, edges, fixed, inputs)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(function: Function, edges: Edges, fixed: Ends, inputs: Ends) -> Ends:
    return sums_without_gradient(function, edges, fixed, inputs)


def sums_without_gradient(
    function: Function, edges: Edges, fixed: Ends, inputs: Ends, finish: Finish | None = None
) -> Ends:
    """Returns the result of `edge_sums`; see there.

    Args:
      function: see `edge_sums`.
      edges: see `edge_sums`.
      fixed: see `edge_sums`.
      inputs: see `edge_sums`.
      finish: changes the sums over a block before they are added to those of its node; None to add them as they are.
    """
    program, results = traced(function, edges, fixed, inputs)
    if program.multiplies or isinstance(edges, CSR):
        return flat_sums(function, edges, fixed, inputs, results)
    found: dict[str, Any] = {}
    after: Any = fixed, inputs
    for here in ("receivers", "senders"):
        end, whole = getattr(results, here), results.shared if here == "receivers" else ()
        if jax.tree.leaves((end, whole)):
            reduction = BlockReduction.of(program, edges, here, (fixed, inputs), (end, whole))
            found[here], totals = reduction.sums(finish, after)
            found |= {"shared": totals} if here == "receivers" else {}
            after = fixed, inputs, found
    leaves, structure = jax.tree.flatten(results.edge)
    if leaves:
        terms = _terms(program, edges, (fixed, inputs), leaves)
        found["edge"] = jax.tree.unflatten(structure, terms)
    return results._replace(**found)


def _terms(program: Program, edges: Edges, ends: tuple[Ends, Ends], wanted: Sequence[Any]) -> list[jax.Array]:
    """Returns the terms of edges: narrow ones in the order of blocks, others in that of the edges."""
    neighbors, like = into(edges), [jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x in wanted]
    if all(size_of(x) <= NARROW for x in wanted):
        reduction = BlockReduction.of(program, edges, "receivers", ends, wanted)
        wide = [jax.ShapeDtypeStruct(x.shape, accumulation_dtype(x.dtype)) for x in like]
        terms = of_edges(
            neighbors, lambda chunk: [upcast(x) for x in reduction.before(chunk)[0]], wide, reduction.elements
        )
        return [x.astype(y.dtype) for x, y in zip(terms, like, strict=True)]
    part = program.part(wanted)
    shared = [x for x in part.arguments if program.end_of(x) == "shared"]
    own = [x for x in part.arguments if x not in shared]
    values = program.read(shared, ends, {})

    def compute(ids: jax.Array, senders: jax.Array, receivers: jax.Array) -> list[jax.Array]:
        rows = program.read(own, ends, {"senders": senders, "receivers": receivers, "edge": ids})
        return jax.vmap(lambda rows: part([*shared, *own], [*values, *rows]), axis_size=len(ids))(rows)

    return each_edge(neighbors, compute, like, part.widest)


def edge_max(function: Function, edges: Edges, fixed: Ends, inputs: Ends) -> Any:
    """Returns the largest terms of a function at the receivers, -inf or the least integer without edges.

    They have no gradient; see `edge_sums`.
    """
    fixed, inputs = jax.lax.stop_gradient((fixed, inputs))
    program, results = traced(function, edges, fixed, inputs)
    reduction = BlockReduction.of(program, edges, "receivers", (fixed, inputs), results.receivers)
    neighbors, (wanted, structure) = reduction.neighbors, jax.tree.flatten(results.receivers)

    def update(most: list[jax.Array], chunk: Chunk) -> list[jax.Array]:
        return [x.at[chunk.nodes].max(y) for x, y in zip(most, reduction.reduced(chunk, is_max=True), strict=True)]

    like = [(x.aval.shape, accumulation_dtype(x.aval.dtype)) for x in wanted]
    start = [jnp.full((neighbors.num_nodes, *shape), least_of(dtype), dtype) for shape, dtype in like]
    most = walk(neighbors, update, start, reduction.elements, are_few=program.multiplies)
    # Or the loop itself would be what a checkpoint around this saves, with the carry of each iteration.
    return jax.tree.unflatten(structure, jax.lax.optimization_barrier(most))


def edge_reductions(
    sums: Function | None, largest: Function | None, edges: Edges, fixed: Ends, inputs: Ends
) -> tuple[Any, Any]:
    """Returns sums and largest terms at the receivers; ties share the gradient of the largest equally.

    The gradient is one sum for both, so that there is one array of the gradients of edge data.

    Args:
      sums: a function of one edge to terms to add; None for none.
      largest: the same, to terms to maximize.
      edges: see `edge_sums`.
      fixed: see `edge_sums`.
      inputs: see `edge_sums`.
    """
    found: Any = _reductions(sums, largest, edges, fixed, inputs)
    return found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reductions(
    sums: Function | None, largest: Function | None, edges: Edges, fixed: Ends, inputs: Ends
) -> tuple[Any, Any]:
    added = () if sums is None else sums_without_gradient(sums, edges, fixed, inputs).receivers
    return added, () if largest is None else edge_max(largest, edges, fixed, inputs)


def first_edges(function: Function, edges: Edges, fixed: Ends, inputs: Ends) -> Any:
    """Returns the first edges, int32 [receivers, ...], whose terms are the largest, NaN included; -1 without any.

    Args:
      function: see `edge_max`.
      edges: see `edge_sums`; edges must have places.
      fixed: see `edge_sums`.
      inputs: see `edge_sums`.
    """
    _ = into(edges).edge_ids  # which raises
    most = edge_max(function, edges, fixed, inputs)
    found = edge_max(_NegativeIds(function), edges, _with(fixed, most), inputs)
    return jax.tree.map(lambda x: jnp.where(x == _NONE, -1, -x), found)


_NONE = jnp.iinfo(jnp.int32).min


@dataclasses.dataclass(frozen=True)
class Gradient:
    """The gradients of a function's terms, as another function; its inputs are pairs with the sums' gradients.

    Attributes:
      function: the function.
      stored: dtypes of the edges' inputs.
    """

    function: Function
    stored: tuple[Any, ...]

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        """Returns the gradients of the terms of one edge."""
        return self.of(self.function, fixed, inputs, ids)

    def batched(self, inner: Callable[[Function], Function], is_edge: jax.Array) -> Function:
        """Returns a function of rows; gradients of what all edges share are added over those that count."""
        function = inner(self.function)

        def counted(x: jax.Array) -> jax.Array:
            return jnp.where(rows_like(is_edge, x), x, jnp.zeros_like(x))

        def run(fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
            pairs = [(own, jax.tree.map(counted, cotangent)) for own, cotangent in inputs[:3]]
            return self.of(function, fixed, Ends._make([*pairs, inputs.shared]), ids)

        return run

    def of(self, function: Function, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        """Returns the gradients, given the function of one edge or of many."""
        own, cotangents = (Ends._make(pair[i] for pair in inputs) for i in (0, 1))
        result, pullback = jax.vjp(lambda own: function(fixed, own, ids), own)
        (found,) = pullback(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangents, result))
        return in_dtypes(found, self.stored)


def in_dtypes(ends: Ends, stored: Sequence[Any]) -> Ends:
    """Returns terms, of which those of edges have the dtypes in which they are stored."""
    leaves, structure = jax.tree.flatten(ends.edge)
    edge = [x.astype(dtype) for x, dtype in zip(leaves, stored, strict=True)]
    return ends._replace(edge=jax.tree.unflatten(structure, edge))


def dtypes_of_edges(inputs: Ends) -> tuple[Any, ...]:
    """Returns the dtypes in which the gradients of edge data are stored."""
    return tuple(x.dtype for x in jax.tree.leaves(inputs.edge))


@dataclasses.dataclass(frozen=True)
class _AddedAndLargest:
    """The terms that are added, and those that equal the fixed largest ones, 0 for others; or 1 for each of these."""

    sums: Function | None
    largest: Function | None
    are_counted: bool = False

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        def chosen(term: jax.Array, most: jax.Array) -> jax.Array:
            return jnp.where(term == most, jnp.ones_like(term) if self.are_counted else term, jnp.zeros_like(term))

        own, most = fixed.receivers
        fixed = fixed._replace(receivers=own)
        added, terms = (() if of is None else of(fixed, inputs, ids).receivers for of in (self.sums, self.largest))
        return Ends(receivers=(added, jax.tree.map(chosen, terms, most)))


@dataclasses.dataclass(frozen=True)
class _NegativeIds:
    """The negative ids of edges whose terms equal fixed ones; of these, the largest is the first edge."""

    function: Function

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        own, most = fixed.receivers
        terms = self.function(fixed._replace(receivers=own), inputs, ids).receivers
        assert ids.edges is not None
        edge = -ids.edges
        return Ends(receivers=jax.tree.map(lambda x, y: jnp.where(equal_or_nan(x, y), edge, _NONE), terms, most))


def _with(fixed: Ends, most: Any) -> Ends:
    return fixed._replace(receivers=(fixed.receivers, jax.lax.stop_gradient(most)))


def _gradients(function: Function, edges: Edges, fixed: Ends, inputs: Ends, cotangents: Ends) -> Ends:
    """Returns the gradients of the inputs in their dtypes."""
    pairs = Ends(*zip(inputs, cotangents, strict=True))
    found = edge_sums(Gradient(function, dtypes_of_edges(inputs)), edges, fixed, pairs)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, inputs)


def _sums_forward(function: Function, edges: Edges, fixed: Ends, inputs: Ends) -> tuple[Ends, _Saved]:
    return edge_sums(function, edges, fixed, inputs), (edges, fixed, inputs)


def _sums_backward(function: Function, saved: _Saved, cotangents: Ends) -> tuple[None, None, Ends]:
    return None, None, _gradients(function, *saved, cotangents)


def _reductions_forward(
    sums: Function | None, largest: Function | None, edges: Edges, fixed: Ends, inputs: Ends
) -> tuple[Any, Any]:
    found: Any = _reductions(sums, largest, edges, fixed, inputs)  # whose gradient second derivatives need
    return found, (edges, _with(fixed, found[1]), inputs)


def _reductions_backward(
    sums: Function | None, largest: Function | None, saved: _Saved, cotangents: Any
) -> tuple[None, None, Ends]:
    edges, fixed, inputs = saved
    of_sums, of_largest = cotangents
    if largest is not None:
        ties = _AddedAndLargest(None, largest, are_counted=True)
        _, counts = edge_sums(ties, edges, fixed, jax.lax.stop_gradient(inputs)).receivers
        of_largest = jax.tree.map(lambda x, y: x / jnp.maximum(y, 1).astype(x.dtype), of_largest, counts)
    terms = _AddedAndLargest(sums, largest)
    return None, None, _gradients(terms, edges, fixed, inputs, Ends(receivers=(of_sums, of_largest)))


_differentiable.defvjp(_sums_forward, _sums_backward)
_reductions.defvjp(_reductions_forward, _reductions_backward)
