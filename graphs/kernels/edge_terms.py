"""Sums over edges, in chunks, of what any elementwise function makes of an edge and its ends.

The gradients of such a sum are sums of the same kind, of the function's own gradients, and so every order of reverse
derivatives is made of these, and no array as long as the edges but the gradient of what the edges have.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import Chunk, add_up, largest, of_edges, upcast_at
from jmp_train.graphs.kernels.spmm_sddmm import edge_rows
from jmp_train.graphs.structure import CSR, CSRAndCSC, upcast

End = Literal["senders", "receivers"]


class Inputs(NamedTuple):
    """What a term is of: trees of floating arrays, `()` for none.

    Attributes:
      edge: [edges, heads]; a term sees [..., heads, 1].
      senders: [senders, heads, width]; a term sees the rows of the edges' senders.
      receivers: [receivers, heads, width].
    """

    edge: Any = ()
    senders: Any = ()
    receivers: Any = ()


_Saved = tuple[CSRAndCSC, Any, Inputs]
# Makes arrays [..., heads, width] of `fixed`, receivers' rows without a gradient, and of the inputs' rows; hashable.
Term = Callable[[Any, Inputs], Any]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def sums_of_terms(term: Term, end: End, edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> Any:
    """Returns the sums [nodes, heads, width] of a term over the edges of each node, computed in float32.

    Args:
      term: elementwise.
      end: whether the nodes are the edges' senders or their receivers.
      edges: who sends to whom.
      fixed: a tree of arrays [receivers, heads, width] that have no gradient.
      inputs: what the term is of.
    """
    neighbors = edges.by_target if end == "receivers" else edges.by_source
    like = jax.eval_shape(term, *_of_one_edge(fixed, inputs))

    def compute(chunk: Chunk) -> list[jax.Array]:
        total: list[jax.Array] = []
        for place, rows in enumerate(_places(neighbors, chunk, end, fixed, inputs)):
            is_edge = chunk.is_edge[:, place, None, None]
            terms = [jnp.where(is_edge, x, jnp.zeros_like(x)) for x in jax.tree.leaves(term(*rows))]
            total = [x + y for x, y in zip(total, terms, strict=True)] if total else terms
        return total

    leaves, structure = jax.tree.flatten(like)
    sums = add_up(neighbors, compute, leaves, _elements(leaves, fixed, inputs), (fixed, inputs))
    return jax.tree.unflatten(structure, sums)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def terms_of_edges(term: Term, edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> Any:
    """Returns a term of each edge: arrays [edges, heads] of a term [..., heads, 1]; 0 for edges that count nowhere.

    Args:
      term: see `sums_of_terms`, and in the end a sum over the width.
      edges: see `sums_of_terms`.
      fixed: see `sums_of_terms`.
      inputs: see `sums_of_terms`.
    """
    neighbors = edges.by_target
    like, structure = jax.tree.flatten(jax.eval_shape(term, *_of_one_edge(fixed, inputs)))
    heads = like[0].shape[0]

    def compute(chunk: Chunk) -> jax.Array:
        rows = _places(neighbors, chunk, "receivers", fixed, inputs)
        of_places = [jnp.concatenate([x[..., 0] for x in jax.tree.leaves(term(*row))], -1) for row in rows]
        return jnp.stack(of_places, 1)

    of_one = jax.ShapeDtypeStruct((len(like) * heads,), like[0].dtype)
    elements = neighbors.width * _elements(like, fixed, inputs)
    result = of_edges(neighbors, compute, of_one, elements)
    return jax.tree.unflatten(structure, jnp.split(result, len(like), axis=-1))


def largest_term(term: Term, edges: CSRAndCSC, inputs: Inputs) -> jax.Array:
    """Returns the largest [receivers, heads, width] of a term over the edges that enter a node, -inf without edges.

    It has no gradient.

    Args:
      term: see `sums_of_terms`; it sees no fixed rows.
      edges: see `sums_of_terms`.
      inputs: see `sums_of_terms`.
    """
    neighbors, inputs = edges.by_target, jax.lax.stop_gradient(inputs)
    like = jax.eval_shape(term, *_of_one_edge((), inputs))

    def compute(chunk: Chunk) -> jax.Array:
        most = jnp.full((len(chunk.nodes), *like.shape), -jnp.inf, like.dtype)
        for place, rows in enumerate(_places(neighbors, chunk, "receivers", (), inputs)):
            most = jnp.maximum(most, jnp.where(chunk.is_edge[:, place, None, None], term(*rows), -jnp.inf))
        return most

    return largest(neighbors, compute, like, _elements([like], (), inputs))


@dataclasses.dataclass(frozen=True)
class _Transposed:
    """The term that is the gradient of another one, with regard to one of its inputs.

    Attributes:
      term: the other one.
      end: of what the gradient of its result is a part: in its place among the inputs are pairs, the old and this.
      part: with regard to what.
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


def _places(neighbors: CSR, chunk: Chunk, end: End, fixed: Any, inputs: Inputs) -> list[tuple[Any, Inputs]]:
    """Returns of each place in the blocks the rows of `fixed` and of the inputs, upcast [blocks, heads, width]."""

    def here(tree: Any) -> list[Any]:
        rows = jax.tree.map(lambda x: upcast_at(x, chunk.nodes), tree)
        return [rows] * neighbors.width

    def there(tree: Any) -> list[Any]:
        return [jax.tree.map(lambda x: upcast_at(x, chunk.others[:, i]), tree) for i in range(neighbors.width)]  # noqa: B023

    def of_edge(x: jax.Array) -> jax.Array:  # XLA would gather it for each number of a row again
        return jax.lax.optimization_barrier(edge_rows(neighbors, chunk, x))[..., None]

    edge = jax.tree.map(of_edge, inputs.edge)
    edges = [jax.tree.map(lambda x: x[:, i], edge) for i in range(neighbors.width)]  # noqa: B023
    senders, receivers, fixed = (
        (here if end == of else there)(tree)
        for of, tree in (("senders", inputs.senders), ("receivers", inputs.receivers), ("receivers", fixed))
    )
    return [(f, Inputs(*rows)) for f, *rows in zip(fixed, edges, senders, receivers, strict=True)]


def _of_one_edge(fixed: Any, inputs: Inputs) -> tuple[Any, Inputs]:
    """Returns the shapes and dtypes of what a term sees of one edge."""

    def like(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(x.shape[1:], upcast(jnp.zeros((), x.dtype)).dtype)

    def of_edge(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*x.shape[1:], 1), like(x).dtype)

    of_ends = jax.tree.map(like, (fixed, inputs.senders, inputs.receivers))
    return of_ends[0], Inputs(jax.tree.map(of_edge, inputs.edge), *of_ends[1:])


def _elements(like: list[Any], fixed: Any, inputs: Inputs) -> int:
    """Returns how many elements a block takes: the rows at this end, those of one place at the other, the sums."""
    rows = [*like, *jax.tree.leaves((fixed, inputs.senders, inputs.receivers))]
    return max(1, max(math.prod(x.shape[-2:]) for x in rows))


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
            found = terms_of_edges(transposed, edges, fixed, whole)
        else:
            found = sums_of_terms(transposed, part, edges, fixed, whole)  # pyright: ignore[reportArgumentType]
        return jax.tree.map(lambda x, like: x.astype(like.dtype), found, own)

    return Inputs(*map(gradient, Inputs._fields))


def _sums_forward(term: Term, end: End, edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> tuple[Any, _Saved]:
    return sums_of_terms(term, end, edges, fixed, inputs), (edges, fixed, inputs)


def _sums_backward(term: Term, end: End, saved: _Saved, cotangent: Any) -> tuple[None, None, Inputs]:
    return None, None, _gradients(term, end, *saved, cotangent)


def _terms_forward(term: Term, edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> tuple[Any, _Saved]:
    return terms_of_edges(term, edges, fixed, inputs), (edges, fixed, inputs)


def _terms_backward(term: Term, saved: _Saved, cotangent: Any) -> tuple[None, None, Inputs]:
    return None, None, _gradients(term, "edge", *saved, cotangent)


sums_of_terms.defvjp(_sums_forward, _sums_backward)
terms_of_edges.defvjp(_terms_forward, _terms_backward)
