"""Attention over edges: sums of messages, weighted by a softmax over the edges that enter a node, of any logits.

An attention is a function of the rows at edges to their logits and messages. With the logit s, its largest value m over
the edges that enter a node, the inverse i of the sum of `exp(s - m)` there, and the factor k of dropout and edge
weight, the result is the sum of `a k z` for messages z, with `a = exp(s - m) i`. With g the gradient of the result, and
`t = g . z`, that of s is `a (k t - d)`, where d is the sum of `a k t` over the node's edges. The difference is taken
for each edge: sums of both terms would cancel at nodes with many edges. All other gradients are the function's own.

In chunks, two values per node and head are stored, and values of edges are computed again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.chunks import (
    Chunk,
    add_up,
    at,
    differentiated_in_float32,
    largest,
    of_edges,
    run_chunked,
    sum_of_rows,
    upcast_at,
)
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.kernels.spmm_sddmm import edge_rows
from jmp_train.graphs.structure import (
    BLOCK,
    CSR,
    Adjacency,
    CSRAndCSC,
    accumulation_dtype,
    finite_or_zero,
    reciprocal,
    upcast,
)
from jmp_train.policies import autocast_as


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeDropout:
    """The dropped edges of each head.

    Attributes:
      words: uint32 [heads, 2], a key of Threefry for each head.
      rate: the fraction of dropped edges.
    """

    words: jax.Array
    rate: float = dataclasses.field(metadata={"static": True})

    def of_edges(self, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge and head [..., heads].

        Args:
          first: int [...], the values that identify an edge.
          second: the same, if two values identify an edge.
        """
        second = jnp.zeros_like(first) if second is None else second
        counts = jnp.stack([first, second]).astype(jnp.uint32)
        draw = jax.vmap(lambda words: threefry_2x32((words[0], words[1]), counts)[0], out_axes=-1)
        is_kept = draw(self.words) >= jnp.uint32(int(self.rate * 2**32))
        return jnp.where(is_kept, jnp.float32(1 / (1 - self.rate)), jnp.float32(0))

    def of_chunk(self, neighbors: CSR, chunk: Chunk, *, nodes_are_receivers: bool) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge [blocks, width, heads].

        Places identify edges or, without places, their two ends: then edges between the same two nodes are dropped
        together.

        Args:
          neighbors: the edges.
          chunk: a chunk of them.
          nodes_are_receivers: True if the edges enter the nodes by which they are sorted.
        """
        if neighbors.edges is not None:
            return self.of_edges(at(neighbors.edges, chunk.positions))
        nodes = jnp.broadcast_to(chunk.nodes[:, None], chunk.others.shape)
        ends = (chunk.others, nodes) if nodes_are_receivers else (nodes, chunk.others)
        return self.of_edges(*ends)


def edge_dropout(rate: float, key: jax.Array | None, heads: int) -> EdgeDropout | None:
    """Returns the dropout of edges; None if it is off.

    Args:
      rate: the fraction of dropped edges.
      key: a random key of any of jax's generators.
      heads: number of heads.
    """
    if not rate or key is None:
        return None
    return EdgeDropout(jax.random.bits(key, (heads, 2), jnp.uint32), rate)


Add = Callable[[jax.Array], jax.Array]


class AttentionInputs(NamedTuple):
    """What an attention reads: trees of floating arrays, None for none.

    Attributes:
      senders: [senders, heads, ...].
      receivers: [receivers, heads, ...].
      edge: [edges, ...].
      shared: [heads, ...], read by all edges.
      weight: [edges], factors of the softmax.
    """

    senders: Any
    receivers: Any
    edge: Any = None
    shared: Any = None
    weight: jax.Array | None = None


class Attended(NamedTuple):
    """The weighted sums.

    Attributes:
      totals: a sum [receivers, heads, width] for each of the messages; 0 without edges.
      log_sum: at least float32 [receivers, heads], the logarithm of the sum of the logits' exponentials; 0 without
        edges.
    """

    totals: list[jax.Array]
    log_sum: jax.Array


class Softmax(NamedTuple):
    """What receivers know of the softmax of their edges, and of its gradient.

    Attributes:
      largest: the largest logits, at least float32 [receivers, heads].
      inverse: 1 over the sums of the powers of the differences to them, of the same shape and dtype.
      of_totals: the gradients of the totals.
      shift: what is subtracted from the gradients of the weights.
    """

    largest: jax.Array
    inverse: jax.Array
    of_totals: Sequence[jax.Array] = ()
    shift: Any = None


@dataclasses.dataclass(frozen=True)
class Side:
    """Edges sorted by one of their ends, and what is read at them.

    Attributes:
      neighbors: the edges.
      dropout: the dropped weights.
      inputs: the inputs of the attention.
      softmax: what receivers know.
      are_receivers: True if the edges enter the nodes by which they are sorted.
    """

    neighbors: CSR
    dropout: EdgeDropout | None
    inputs: AttentionInputs
    softmax: Softmax | None = None
    are_receivers: bool = True

    def rows(self, chunk: Chunk) -> tuple[AttentionInputs, Any]:
        """Returns the upcast rows of the inputs and of the softmax; [blocks, 1, ...] for those of a block's node."""
        here, there = chunk.of_nodes, chunk.of_others
        of_senders, of_receivers = (there, here) if self.are_receivers else (here, there)
        senders, receivers, edge, shared, _ = self.inputs
        receivers, softmax = jax.tree.map(of_receivers, (receivers, self.softmax))
        edge = jax.tree.map(lambda x: upcast_at(x, at(self.neighbors.edge_ids, chunk.positions)), edge)
        shared = jax.tree.map(lambda x: jnp.broadcast_to(upcast(x), (len(chunk.nodes), 1, *x.shape)), shared)
        return AttentionInputs(jax.tree.map(of_senders, senders), receivers, edge, shared), softmax

    def factor(self, chunk: Chunk, *, has_weight: bool = True) -> jax.Array | None:
        """Returns the factors of a chunk's weights [blocks, width, heads or 1]; None for 1."""
        factor, weight = None, self.inputs.weight if has_weight else None
        if self.dropout is not None:
            factor = self.dropout.of_chunk(self.neighbors, chunk, nodes_are_receivers=self.are_receivers)
        return factor if weight is None else times(edge_rows(self.neighbors, chunk, weight)[..., None], factor)


def times(data: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Returns data times a factor in its dtype; None for 1."""
    return data if factor is None else data * factor.astype(data.dtype)


class Attention:
    """An attention; subclasses are hashable.

    Attributes:
      is_exact: whether its sums are in at least float32, not in the dtype of the messages.
    """

    is_exact = False

    def __call__(self, rows: AttentionInputs, add: Add = sum_of_rows) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits [..., heads] and messages [..., heads, width] of upcast rows, adding over widths by `add`."""
        raise NotImplementedError

    def elements(self, neighbors: CSR, inputs: AttentionInputs) -> int:
        """Returns the number of elements that a block computes without a gradient."""
        return elements_of(self, neighbors, inputs)

    def sums(
        self, dtype: DTypeLike, neighbors: CSR, dropout: EdgeDropout | None, inputs: AttentionInputs
    ) -> tuple[list[jax.Array], Softmax]:
        """Returns the weighted sums in a dtype, and what the gradient needs."""
        side, elements = Side(neighbors, dropout, inputs), self.elements(neighbors, inputs)
        of_head, *of_messages = _like(self, inputs)

        def highest(chunk: Chunk) -> jax.Array:
            return jnp.where(chunk.is_edge[..., None], self(side.rows(chunk)[0])[0], -jnp.inf).max(1)

        most = finite_or_zero(largest(neighbors, highest, of_head, elements))

        def parts(chunk: Chunk) -> list[jax.Array]:
            powers = chunk.where_edge(jnp.exp(self(side.rows(chunk)[0])[0] - chunk.of_nodes(most)))
            weights = times(powers, side.factor(chunk))
            weighted = lambda one, weights: [weights[..., None] * x for x in self(side.rows(one)[0])[1]]
            return [powers.sum(1), *chunk.sums_by_place(weighted, weights)]

        sizes, *totals = add_up(neighbors, parts, [of_head, *of_messages], elements, most)
        inverse = reciprocal(sizes)
        return [(x * inverse[..., None]).astype(dtype) for x in totals], Softmax(most, inverse)

    def gradients(
        self, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: AttentionInputs, softmax: Softmax
    ) -> AttentionInputs:
        """Returns the gradients of the inputs; `softmax.shift` lacks d unless the sums are exact."""
        into = Side(edges.by_target, dropout, inputs, softmax)
        elements = elements_of(self, into.neighbors, inputs)
        if not self.is_exact:

            def means(chunk: Chunk) -> list[jax.Array]:
                weights, products = _weights(self, into, chunk)
                return [(weights * times(products, into.factor(chunk))).sum(1)]

            (found,) = add_up(into.neighbors, means, _like(self, inputs)[:1], elements, softmax)
            softmax = softmax._replace(shift=softmax.shift + found)
        into, out = (
            Side(edges.by_target, dropout, inputs, softmax),
            Side(edges.by_source, dropout, inputs, softmax, False),
        )
        of_receivers, of_shared = _added(self, into, softmax, "receivers", "shared")
        of_shared = jax.tree.map(_total, of_shared)
        of_receivers = jax.tree.map(lambda x, like: x.astype(like.dtype), of_receivers, inputs.receivers)
        (of_senders,) = _added(self, out, (of_receivers, of_shared), "senders")

        def of_edge(chunk: Chunk) -> jax.Array:
            return _pulled_back(self, into, ["edge"], chunk, *_of_logits(self, into, chunk))[0]

        of_edges = None if inputs.edge is None else _at_edges(into, of_edge, inputs.edge, elements)
        return AttentionInputs(of_senders, of_receivers, of_edges, of_shared, of_weights(self, into))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attended(attention: Attention, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: AttentionInputs) -> Attended:
    return _forward(attention, edges, dropout, inputs)[0]


def _forward(
    attention: Attention, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: AttentionInputs
) -> tuple[Attended, Any]:
    dtype = _dtype(attention, inputs)
    sums = differentiated_in_float32(functools.partial(attention.sums, dtype))
    totals, softmax = sums(edges.by_target, dropout, inputs)
    # Exact sums say what another pass over the edges would find.
    saved = totals if attention.is_exact else []
    log_sum = softmax.largest - jnp.log(softmax.inverse)
    return Attended(totals, log_sum), (edges, dropout, inputs, softmax, saved)


def _backward(attention: Attention, saved: Any, gradient: Attended) -> tuple[None, None, AttentionInputs]:
    gradients = differentiated_in_float32(
        functools.partial(_gradients, attention), functools.partial(_gradients_anew, attention)
    )
    return None, None, gradients(saved, gradient)


def _gradients(attention: Attention, saved: Any, gradient: Attended) -> AttentionInputs:
    edges, dropout, inputs, softmax, totals = saved
    softmax = softmax._replace(of_totals=gradient.totals)
    shift: Any = sum((_plain_sum(g * x) for g, x in zip(softmax.of_totals, totals, strict=bool(totals))), start=0)
    softmax = softmax._replace(shift=shift - gradient.log_sum)
    found = attention.gradients(edges, dropout, inputs, softmax)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, inputs)


def _gradients_anew(attention: Attention, saved: Any, gradient: Attended) -> AttentionInputs:
    """Finds the softmax again, so that parts of a derivative that cancel are added before they are rounded."""
    edges, dropout, inputs, *_ = saved
    return _gradients(attention, _forward(attention, edges, dropout, inputs)[1], gradient)


_attended.defvjp(_forward, _backward)


def _weights(attention: Attention, side: Side, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    """Returns the softmax of a chunk's edges, and `t` [blocks, width, heads]."""
    rows, softmax = side.rows(chunk)
    logits, messages = attention(rows)
    weights = chunk.where_edge(jnp.exp(logits - softmax.largest) * softmax.inverse)
    products: Any = sum(sum_of_rows(g * x) for g, x in zip(softmax.of_totals, messages, strict=True))
    return weights, chunk.where_edge(products)


def _of_logits(attention: Attention, side: Side, chunk: Chunk) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of logits [blocks, width, heads], and the weights times their factors."""
    weights, products = _weights(attention, side, chunk)
    factor, softmax = side.factor(chunk), side.rows(chunk)[1]
    return weights * (times(products, factor) - softmax.shift), times(weights, factor)


def _pulled_back(
    attention: Attention, side: Side, parts: Sequence[str], chunk: Chunk, of_logits: jax.Array, weights: jax.Array
) -> Any:
    """Returns the gradients of rows that a chunk's edges read, [blocks, width, ...]."""
    rows, softmax = side.rows(chunk)
    run = lambda *own: attention(rows._replace(**dict(zip(parts, own, strict=True))))
    (logits, messages), pullback = jax.vjp(run, *(getattr(rows, part) for part in parts))
    of_messages = [(weights[..., None] * g).astype(x.dtype) for g, x in zip(softmax.of_totals, messages, strict=True)]
    return pullback((of_logits.astype(logits.dtype), of_messages))


def _added(attention: Attention, side: Side, after: Any, *parts: str) -> Any:
    """Returns the gradients of what edges read, added at the nodes of a side."""
    leaves, structure = jax.tree.flatten([getattr(side.inputs, part) for part in parts])
    shared = jax.tree.leaves(side.inputs.shared)
    like = [
        jax.ShapeDtypeStruct(x.shape if any(x is y for y in shared) else x.shape[1:], accumulation_dtype(x.dtype))
        for x in leaves
    ]

    def compute(chunk: Chunk) -> list[jax.Array]:
        pull = functools.partial(_pulled_back, attention, side, parts)
        return chunk.sums_by_place(lambda *args: jax.tree.leaves(pull(*args)), *_of_logits(attention, side, chunk))

    elements = elements_of(attention, side.neighbors, side.inputs)
    return jax.tree.unflatten(structure, add_up(side.neighbors, compute, like, elements, after))


def of_weights(attention: Attention, into: Side) -> jax.Array | None:
    """Returns the gradient of the edges' weights."""
    if into.inputs.weight is None:
        return None

    def compute(chunk: Chunk) -> jax.Array:
        weights, products = _weights(attention, into, chunk)
        return (times(weights, into.factor(chunk, has_weight=False)) * products).sum(-1)

    return _at_edges(into, compute, into.inputs.weight, elements_of(attention, into.neighbors, into.inputs))


def _at_edges(side: Side, compute: Callable[[Chunk], jax.Array], like: jax.Array, elements: int) -> jax.Array:
    row = jax.ShapeDtypeStruct(like.shape[1:], accumulation_dtype(like.dtype))
    return of_edges(side.neighbors, compute, row, elements)


def _like(attention: Attention, inputs: AttentionInputs) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes of one edge's logits and messages."""

    def row(x: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((1, *x.shape[1:]), accumulation_dtype(x.dtype))

    shared = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, accumulation_dtype(x.dtype)), inputs.shared)
    found = jax.eval_shape(
        functools.partial(attention, add=_plain_sum), jax.tree.map(row, inputs)._replace(shared=shared)
    )
    return [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in jax.tree.leaves(found)]


def _plain_sum(data: jax.Array) -> jax.Array:
    return data.sum(-1)


def _dtype(attention: Attention, inputs: AttentionInputs) -> DTypeLike:
    stored = jax.tree.leaves(inputs.senders)[0].dtype
    return accumulation_dtype(stored) if attention.is_exact else stored


def elements_of(attention: Attention, neighbors: CSR, inputs: AttentionInputs) -> int:
    """Returns the number of elements that a block computes if all messages of its edges are at hand."""
    wide = max(math.prod(x.shape) for x in _like(attention, inputs)[1:])
    return max(1, neighbors.width * wide // 2)


def _total(rows: jax.Array) -> jax.Array:
    """Returns the sum over the first axis, in blocks of blocks."""
    while rows.shape[0] > 1:
        pad = [(0, -rows.shape[0] % BLOCK)] + [(0, 0)] * (rows.ndim - 1)
        blocks = jnp.pad(rows, pad).reshape(-1, BLOCK, *rows.shape[1:])
        rows = jax.lax.optimization_barrier(blocks.sum(1))  # XLA would join the sums to one
    return rows.sum(0)


def _by_chunks(
    adjacency: Adjacency, attention: Attention, dropout: EdgeDropout | None, inputs: AttentionInputs
) -> Attended:
    if not _like(attention, inputs)[1].size:  # no heads, or no width
        return _by_xla(adjacency, attention, dropout, inputs)
    return run_chunked(functools.partial(_attended, attention), adjacency.neighbors, dropout, inputs)


def _by_xla(
    adjacency: Adjacency, attention: Attention, dropout: EdgeDropout | None, inputs: AttentionInputs
) -> Attended:
    @jax.checkpoint
    def attend(adjacency: Adjacency, dropout: EdgeDropout | None, inputs: AttentionInputs) -> Attended:
        senders, receivers = adjacency.senders, adjacency.receivers
        wide = jax.tree.map(upcast, inputs)
        rows = wide._replace(
            senders=jax.tree.map(senders.read, wide.senders), receivers=jax.tree.map(receivers.read, wide.receivers)
        )
        logits, messages = attention(rows, _plain_sum)
        weights, log_sum = receivers.softmax(logits), jnp.zeros(())
        if attention.is_exact:
            logits = jnp.where(receivers.is_counted[:, None], logits, -jnp.inf)
            most = finite_or_zero(jax.lax.stop_gradient(receivers.max(logits)))
            log_sum = most - jnp.log(reciprocal(receivers.sum(jnp.exp(logits - receivers.read(most)))))
        if dropout is not None:
            weights = times(weights, dropout.of_edges(jnp.arange(len(weights))))
        if inputs.weight is not None:
            weights = times(weights, inputs.weight[:, None])
        return Attended([receivers.sum(weights[..., None] * x) for x in messages], log_sum)

    found = autocast_as("float32")(attend)(adjacency, dropout, inputs)
    return found._replace(totals=[x.astype(_dtype(attention, inputs)) for x in found.totals])


ATTENTION = EdgeOperation(
    {"xla": _by_xla, "chunked": _by_chunks}, lambda attention, dropout, inputs: _like(attention, inputs)[1].size
)
