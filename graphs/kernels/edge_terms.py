"""Sums and extremes over edges, in chunks, of a function of each edge and its ends.

The gradients of such a sum are sums of the same kind, of the function's gradients. So reverse derivatives of every
order consist of these, and only gradients of edge data are as long as the edges.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import Chunk, add_up, at, each_edge, largest, upcast_at
from jmp_train.graphs.kernels.spmm_sddmm import edge_rows
from jmp_train.graphs.structure import CSR, CSRAndCSC, accumulation_dtype, equal_or_nan, rows_like

End = Literal["senders", "receivers"]
NARROW = 8  # numbers of an edge that are read for all places of a block at once


class Inputs(NamedTuple):
    """The inputs of a term: trees of floating arrays, `()` for none.

    Attributes:
      edge: [edges, ...]; a term gets rows [rows, ...], upcast, like those of the other inputs.
      senders: [senders, ...]; a term gets the rows of the edges' senders.
      receivers: [receivers, ...].
    """

    edge: Any = ()
    senders: Any = ()
    receivers: Any = ()


_Saved = tuple[CSRAndCSC, Any, Inputs]
# Makes a tree of arrays [rows, ...] of `fixed`, receivers' rows without a gradient, and of the inputs' rows; hashable.
Term = Callable[[Any, Inputs], Any]


def weighted_sender(fixed: Any, inputs: Inputs) -> jax.Array:
    """Returns the senders' rows [rows, heads, width], times the edges' weights [rows, heads, 1] if given.

    Args:
      fixed: unused.
      inputs: the senders' features and, if given, the weights.
    """
    del fixed
    return inputs.senders if isinstance(inputs.edge, tuple) else inputs.edge * inputs.senders


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sums_of_terms(term: Term, end: End, edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> Any:
    """Returns the sums [nodes, ...] of a term over the edges of each node, computed in float32.

    Args:
      term: a function of one edge.
      end: the nodes: the edges' senders or receivers.
      edges: the edges.
      fixed: a tree of arrays [receivers, ...] that have no gradient.
      inputs: the inputs of the term.
    """
    neighbors = edges.by_target if end == "receivers" else edges.by_source
    leaves, structure = jax.tree.flatten(_like(term, fixed, inputs))

    def compute(chunk: Chunk) -> list[jax.Array]:
        total: list[jax.Array] = []
        for place, rows in enumerate(_places(neighbors, chunk, end, fixed, inputs)):
            terms = [_where(chunk.is_edge[:, place], x, 0) for x in jax.tree.leaves(term(*rows))]
            total = [x + y for x, y in zip(total, terms, strict=True)] if total else terms
        return total

    sums = add_up(neighbors, compute, leaves, _elements(leaves, fixed, inputs), (fixed, inputs))
    return jax.tree.unflatten(structure, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def terms_of_edges(term: Term, stored: tuple[Any, ...], edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> Any:
    """Returns a term of each edge, a tree of arrays [edges, ...]; 0 for edges that count nowhere.

    Args:
      term: see `sums_of_terms`.
      stored: the dtype of each of the tree's leaves.
      edges: see `sums_of_terms`; edges must have places.
      fixed: see `sums_of_terms`.
      inputs: see `sums_of_terms`.
    """
    leaves, structure = jax.tree.flatten(_like(term, fixed, inputs))

    def compute(ids: jax.Array, senders: jax.Array, receivers: jax.Array) -> list[jax.Array]:
        def read(ids: jax.Array, tree: Any) -> Any:
            return jax.tree.map(lambda x: upcast_at(x, ids), tree)

        rows = Inputs(read(ids, inputs.edge), read(senders, inputs.senders), read(receivers, inputs.receivers))
        return jax.tree.leaves(term(read(receivers, fixed), rows))

    like = [jax.ShapeDtypeStruct(x.shape, dtype) for x, dtype in zip(leaves, stored, strict=True)]
    return jax.tree.unflatten(structure, each_edge(edges.by_target, compute, like, _elements(leaves, fixed, inputs)))


def largest_term(term: Term, edges: CSRAndCSC, inputs: Inputs) -> jax.Array:
    """Returns the largest [receivers, ...] of a term over the edges that enter a node, -inf without edges.

    It has no gradient.

    Args:
      term: see `sums_of_terms`; it returns one array, and gets no fixed rows.
      edges: see `sums_of_terms`.
      inputs: see `sums_of_terms`.
    """
    neighbors, inputs = edges.by_target, jax.lax.stop_gradient(inputs)
    like = _like(term, (), inputs)

    def compute(chunk: Chunk) -> jax.Array:
        most = jnp.full((len(chunk.nodes), *like.shape), -jnp.inf, like.dtype)
        for place, rows in enumerate(_places(neighbors, chunk, "receivers", (), inputs)):
            most = jnp.maximum(most, _where(chunk.is_edge[:, place], term(*rows), -jnp.inf))
        return most

    # Or the loop itself would be what a checkpoint around this saves, with the carry of each iteration.
    return jax.lax.optimization_barrier(largest(neighbors, compute, like, _elements([like], (), inputs)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def extreme_term(term: Term, edges: CSRAndCSC, inputs: Inputs) -> jax.Array:
    """Returns the result of `largest_term` with a gradient, which ties share equally.

    Args:
      term: see `largest_term`.
      edges: see `sums_of_terms`.
      inputs: see `sums_of_terms`.
    """
    return largest_term(term, edges, inputs)


def first_edges(term: Term, edges: CSRAndCSC, most: jax.Array, inputs: Inputs) -> jax.Array:
    """Returns the first edges, int32 [receivers, ...], whose term equals a given one, NaN included; -1 without any.

    Args:
      term: see `largest_term`.
      edges: see `sums_of_terms`; edges must have places.
      most: the result of `largest_term`.
      inputs: see `sums_of_terms`.
    """
    neighbors, (most, inputs) = edges.by_target, jax.lax.stop_gradient((most, inputs))
    ids, none = neighbors.edge_ids, jnp.iinfo(jnp.int32).min
    like = jax.ShapeDtypeStruct(most.shape[1:], jnp.int32)

    def compute(chunk: Chunk) -> jax.Array:
        first = jnp.full((len(chunk.nodes), *like.shape), none, jnp.int32)  # negative ids, of which it is the largest
        for place, (wanted, rows) in enumerate(_places(neighbors, chunk, "receivers", most, inputs)):
            found = term((), rows)
            is_found = equal_or_nan(found, wanted)
            is_found &= rows_like(chunk.is_edge[:, place], found)
            edge = rows_like(-at(ids, chunk.positions[:, place]), found)
            first = jnp.maximum(first, jnp.where(is_found, edge, none))
        return first

    first = largest(neighbors, compute, like, _elements([like], most, inputs))
    return jnp.where(first == none, -1, -first)


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """The gradient of a term with respect to one of its inputs, as a term.

    Attributes:
      term: the differentiated term.
      end: the input next to which the gradient of the result is passed: its place has pairs of both.
      part: the input to differentiate by.
    """

    term: Term
    end: str
    part: str

    def __call__(self, fixed: Any, inputs: Inputs) -> Any:
        own, cotangent = getattr(inputs, self.end)
        inputs = inputs._replace(**{self.end: own})

        def of_part(part: Any) -> Any:
            return self.term(fixed, inputs._replace(**{self.part: part}))

        result, pullback = jax.vjp(of_part, getattr(inputs, self.part))
        (gradient,) = pullback(jax.tree.map(lambda x, like: x.astype(like.dtype), cotangent, result))
        return gradient


@dataclasses.dataclass(frozen=True)
class _Chosen:
    """A term if it equals a fixed one, otherwise 0."""

    term: Term

    def __call__(self, fixed: jax.Array, inputs: Inputs) -> jax.Array:
        terms = self.term((), inputs)
        return jnp.where(terms == fixed, terms, jnp.zeros_like(terms))


@dataclasses.dataclass(frozen=True)
class _IsChosen:
    """1 if a term equals a fixed one, otherwise 0."""

    term: Term

    def __call__(self, fixed: jax.Array, inputs: Inputs) -> jax.Array:
        terms = self.term((), inputs)
        return (terms == fixed).astype(terms.dtype)


def _places(neighbors: CSR, chunk: Chunk, end: End, fixed: Any, inputs: Inputs) -> Iterator[tuple[Any, Inputs]]:
    """Yields for each place in the blocks the rows [blocks, ...] of `fixed` and of the inputs, upcast."""

    def is_narrow(x: jax.Array) -> bool:
        return math.prod(x.shape[1:]) <= NARROW

    def of_block(x: jax.Array) -> jax.Array:  # XLA would gather it for each number of a row again
        return jax.lax.optimization_barrier(edge_rows(neighbors, chunk, x)) if is_narrow(x) else x

    blocks = jax.tree.map(of_block, inputs.edge)
    here = jax.tree.map(lambda x: upcast_at(x, chunk.nodes), inputs.senders if end == "senders" else inputs.receivers)
    fixed_here = None if end == "senders" else jax.tree.map(lambda x: upcast_at(x, chunk.nodes), fixed)

    for place in range(neighbors.width):

        def there(x: jax.Array, place: int = place) -> jax.Array:
            return upcast_at(x, chunk.others[:, place])

        def of_edge(x: jax.Array, rows: jax.Array, place: int = place) -> jax.Array:
            if is_narrow(x):
                return rows[:, place]
            return upcast_at(x, at(neighbors.edge_ids, chunk.positions[:, place]))

        edge = jax.tree.map(of_edge, inputs.edge, blocks)
        if end == "senders":
            yield jax.tree.map(there, fixed), Inputs(edge, here, jax.tree.map(there, inputs.receivers))
        else:
            yield fixed_here, Inputs(edge, jax.tree.map(there, inputs.senders), here)


def _where(is_edge: jax.Array, data: jax.Array, other: float) -> jax.Array:
    """Returns the rows of edges, and another number in empty places."""
    return jnp.where(rows_like(is_edge, data), data, jnp.asarray(other, data.dtype))


def _like(term: Term, fixed: Any, inputs: Inputs) -> Any:
    """Returns the shapes and dtypes of a term of one edge."""

    def row(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), accumulation_dtype(x.dtype))

    found = jax.eval_shape(term, *jax.tree.map(row, (fixed, inputs)))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), found)


def _elements(like: list[Any], fixed: Any, inputs: Inputs) -> int:
    """Returns the number of elements per block: rows at this end, those of one place at the other, and sums."""
    rows = [math.prod(x.shape[1:]) for x in jax.tree.leaves((fixed, inputs))]
    return max([1, *rows, *(math.prod(x.shape) for x in like)])


def _with(inputs: Inputs, end: str, cotangent: Any) -> Inputs:
    return inputs._replace(**{end: (getattr(inputs, end), cotangent)})


def _gradients(term: Term, end: str, edges: CSRAndCSC, fixed: Any, inputs: Inputs, cotangent: Any) -> Inputs:
    """Returns the gradients of the inputs in their dtypes."""
    whole = _with(inputs, end, cotangent)

    def gradient(part: str) -> Any:
        own = getattr(inputs, part)
        if not jax.tree.leaves(own):
            return own
        transposed = _Transposed(term, end, part)
        if part == "edge":
            stored = tuple(x.dtype for x in jax.tree.leaves(own))
            return terms_of_edges(transposed, stored, edges, fixed, whole)
        found = sums_of_terms(transposed, part, edges, fixed, whole)  # pyright: ignore[reportArgumentType]
        return jax.tree.map(lambda x, like: x.astype(like.dtype), found, own)

    return Inputs(*map(gradient, Inputs._fields))


def _sums_forward(term: Term, end: End, edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> tuple[Any, _Saved]:
    return sums_of_terms(term, end, edges, fixed, inputs), (edges, fixed, inputs)


def _sums_backward(term: Term, end: End, saved: _Saved, cotangent: Any) -> tuple[None, None, Inputs]:
    return None, None, _gradients(term, end, *saved, cotangent)


def _terms_forward(
    term: Term, stored: tuple[Any, ...], edges: CSRAndCSC, fixed: Any, inputs: Inputs
) -> tuple[Any, _Saved]:
    return terms_of_edges(term, stored, edges, fixed, inputs), (edges, fixed, inputs)


def _terms_backward(term: Term, stored: tuple[Any, ...], saved: _Saved, cotangent: Any) -> tuple[None, None, Inputs]:
    del stored
    return None, None, _gradients(term, "edge", *saved, cotangent)


def _extreme_forward(term: Term, edges: CSRAndCSC, inputs: Inputs) -> tuple[jax.Array, _Saved]:
    most: Any = extreme_term(term, edges, inputs)  # whose gradient second derivatives need
    return most, (edges, most, inputs)


def _extreme_backward(term: Term, saved: _Saved, cotangent: jax.Array) -> tuple[None, Inputs]:
    edges, most, inputs = saved
    ties: Any = sums_of_terms(_IsChosen(term), "receivers", edges, most, jax.lax.stop_gradient(inputs))
    share = cotangent / jnp.maximum(ties, jnp.ones_like(ties))
    return None, _gradients(_Chosen(term), "receivers", edges, most, inputs, share)


sums_of_terms.defvjp(_sums_forward, _sums_backward)
terms_of_edges.defvjp(_terms_forward, _terms_backward)
extreme_term.defvjp(_extreme_forward, _extreme_backward)
