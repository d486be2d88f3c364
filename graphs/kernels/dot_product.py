"""Chunked dot-product attention: stores two values per node and head, and recomputes values of edges.

The logit of an edge from u to v is `s = scale q[v] . (k[u] + W f)`, and its value is `z[u] + W f`, where `f` are the
features of the edge and `W` is a matrix. These kernels do not need `W`: `q[v] . W f` is the product of `f` and a row of
v, the edge's query, and the caller multiplies the weighted sum of `f` by `W`. The logarithms of the softmaxes' sums,
which have gradients, allow joining several softmaxes of one node.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention import EdgeDropout, Saved, dropout_and_weight, times
from jmp_train.graphs.kernels.chunks import Chunk, add_up, largest, of_edges, run_chunked
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.kernels.spmm_sddmm import edge_rows
from jmp_train.graphs.structure import (
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
class DotInputs:
    """The inputs of attention.

    Attributes:
      query: floating [receivers, heads, width].
      key: floating [senders, heads, width].
      value: floating [senders, heads, width].
      edge_features: floating [edges, features], or None.
      edge_query: at least float32 [receivers, heads, features], or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    edge_features: jax.Array | None = None
    edge_query: jax.Array | None = None


class DotResult(NamedTuple):
    """Attention, all in at least float32.

    Attributes:
      total: [receivers, heads, width], the weighted sum of values; 0 without edges.
      edge_total: [receivers, heads, features], the weighted sum of the edges' features; None without features.
      log_sum: [receivers, heads], the logarithm of the sum of the logits' exponentials; 0 without edges.
    """

    total: jax.Array
    edge_total: jax.Array | None
    log_sum: jax.Array


_Saved = Saved[DotInputs]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_dot_attention(scale: float, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    """Returns attention over the edges that enter each node.

    Args:
      scale: factor of the products.
      edges: the edges.
      dropout: the dropped weights.
      inputs: the inputs of attention.
    """
    return _forward(scale, edges, dropout, inputs)[0]


def _forward(
    scale: float, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: DotInputs
) -> tuple[DotResult, _Saved]:
    neighbors, value = edges.by_target, inputs.value
    _, heads, width = value.shape
    dtype = accumulation_dtype(value.dtype)
    of_head = jax.ShapeDtypeStruct((heads,), dtype)
    elements = _elements(neighbors, inputs)

    def highest(chunk: Chunk) -> jax.Array:
        return jnp.where(chunk.is_edge[..., None], _logits_into(scale, neighbors, chunk, inputs), -jnp.inf).max(1)

    most = finite_or_zero(largest(neighbors, highest, of_head, elements))

    def parts(chunk: Chunk) -> list[jax.Array]:
        logits = _logits_into(scale, neighbors, chunk, inputs)
        terms = chunk.where_edge(jnp.exp(logits - chunk.of_nodes(most)))
        weights = times(terms, dropout_and_weight(neighbors, chunk, dropout, None, nodes_are_receivers=True))
        return [chunk.sum_of_others(value, weights), terms.sum(1), *_edge_sums(neighbors, chunk, inputs, weights)]

    like = [jax.ShapeDtypeStruct((heads, width), dtype), of_head, *_like_edge_sums(inputs, dtype)]
    total, sizes, *edge_total = add_up(neighbors, parts, like, elements, most)
    inverse = reciprocal(sizes)
    log_sum = jnp.where(sizes > 0, most + jnp.log(jnp.where(sizes > 0, sizes, jnp.ones_like(sizes))), 0)
    found = DotResult(total * inverse[..., None], edge_total[0] * inverse[..., None] if edge_total else None, log_sum)
    return found, Saved(edges, dropout, inputs, most, inverse)


def _backward(scale: float, saved: _Saved, gradient: DotResult) -> tuple[None, None, DotInputs]:
    edges, dropout, inputs, most, inverse = saved
    query, key, value = inputs.query, inputs.key, inputs.value
    _, heads, width = value.shape
    dtype = most.dtype
    of_head, of_row = jax.ShapeDtypeStruct((heads,), dtype), jax.ShapeDtypeStruct((heads, width), dtype)
    into, out = edges.by_target, edges.by_source
    grad, edge_grad = gradient.total, gradient.edge_total

    def into_node(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Returns the weights times their factors, and these times the gradients of the weights."""
        logits = _logits_into(scale, into, chunk, inputs)
        weights = chunk.where_edge(jnp.exp(logits - chunk.of_nodes(most)) * chunk.of_nodes(inverse))
        factor = dropout_and_weight(into, chunk, dropout, None, nodes_are_receivers=True)
        products = chunk.dot_with_others(value, grad)
        if edge_grad is not None:
            products = products + _edge_products(into, chunk, inputs, chunk.of_nodes(edge_grad))
        return weights, chunk.where_edge(weights * times(products, factor))

    def of_receivers(chunk: Chunk) -> list[jax.Array]:
        weights, terms = into_node(chunk)
        sums = [[chunk.sum_of_others(key, x), *_edge_sums(into, chunk, inputs, x)] for x in (terms, weights)]
        return [terms.sum(1), *sums[0], *sums[1]]

    like = [of_row, *_like_edge_sums(inputs, dtype)]
    mean, *sums = add_up(into, of_receivers, [of_head, *like, *like], _elements(into, inputs), grad)
    shift = mean - gradient.log_sum  # of the gradient of a logit
    of_queries = [
        scale * (terms - shift[..., None] * weights)
        for terms, weights in zip(sums[: len(like)], sums[len(like) :], strict=True)
    ]

    def of_senders(chunk: Chunk) -> list[jax.Array]:
        logits = chunk.dot_with_others(query, key)
        if inputs.edge_query is not None:
            logits = logits + _edge_products(out, chunk, inputs, chunk.of_others(inputs.edge_query))
        weights = jnp.exp(scale * logits - chunk.of_others(most)) * chunk.of_others(inverse)
        weights = chunk.where_edge(weights)
        factor = dropout_and_weight(out, chunk, dropout, None, nodes_are_receivers=False)
        products = chunk.dot_with_others(grad, value)
        if edge_grad is not None:
            products = products + _edge_products(out, chunk, inputs, chunk.of_others(edge_grad))
        of_logits = weights * (times(products, factor) - chunk.of_others(shift))
        of_logits = chunk.where_edge(of_logits)
        return [scale * chunk.sum_of_others(query, of_logits), chunk.sum_of_others(grad, times(weights, factor))]

    of_key, of_value = add_up(out, of_senders, [of_row] * 2, _elements(out, inputs), sums)
    of_features = None
    if inputs.edge_features is not None:

        def of_each(chunk: Chunk) -> jax.Array:
            weights, terms = into_node(chunk)
            of_logits = scale * (terms - weights * chunk.of_nodes(shift))
            factor = dropout_and_weight(into, chunk, dropout, None, nodes_are_receivers=True)
            assert inputs.edge_query is not None
            found = _edge_rows_of(of_logits, chunk.of_nodes(inputs.edge_query))
            return (
                found if edge_grad is None else found + _edge_rows_of(times(weights, factor), chunk.of_nodes(edge_grad))
            )

        like_row = jax.ShapeDtypeStruct(inputs.edge_features.shape[1:], dtype)
        found = of_edges(into, of_each, like_row, _elements(into, inputs))
        of_features = found.astype(inputs.edge_features.dtype)
    of_edge_query = None if inputs.edge_query is None else of_queries[1].astype(inputs.edge_query.dtype)
    of_inputs = DotInputs(
        of_queries[0].astype(query.dtype),
        of_key.astype(key.dtype),
        of_value.astype(value.dtype),
        of_features,
        of_edge_query,
    )
    return None, None, of_inputs


chunked_dot_attention.defvjp(_forward, _backward)


def _elements(neighbors: CSR, inputs: DotInputs) -> int:
    _, heads, width = inputs.value.shape
    features = 0 if inputs.edge_features is None else inputs.edge_features.shape[1]
    return max(1, neighbors.width * heads * max(width, features) // 2)


def _logits_into(scale: float, neighbors: CSR, chunk: Chunk, inputs: DotInputs) -> jax.Array:
    """Returns the logits [blocks, width, heads] of a chunk of edges, by the nodes that they enter."""
    logits = chunk.dot_with_others(inputs.key, inputs.query)
    if inputs.edge_query is not None:
        logits = logits + _edge_products(neighbors, chunk, inputs, chunk.of_nodes(inputs.edge_query))
    return scale * logits


def _edge_products(neighbors: CSR, chunk: Chunk, inputs: DotInputs, rows: jax.Array) -> jax.Array:
    """Returns the products [blocks, width, heads] of edges' features and rows [blocks, width or 1, heads, features]."""
    assert inputs.edge_features is not None
    features = edge_rows(neighbors, chunk, inputs.edge_features)[:, :, None].astype(rows.dtype)
    return (features * rows).sum(-1)


def _edge_sums(neighbors: CSR, chunk: Chunk, inputs: DotInputs, weights: jax.Array) -> list[jax.Array]:
    """Returns the weighted sums [blocks, heads, features] of the edges' features; an empty tree without features."""
    if inputs.edge_features is None:
        return []
    rows = edge_rows(neighbors, chunk, inputs.edge_features).astype(weights.dtype)
    return [jnp.einsum("nwh,nwf->nhf", weights, rows, precision="highest")]


def _edge_rows_of(weights: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns rows [blocks, 1, heads, features], weighted [blocks, width, heads] and summed over the heads."""
    return jnp.einsum("nwh,nhf->nwf", weights, rows[:, 0].astype(weights.dtype), precision="highest")


def _like_edge_sums(inputs: DotInputs, dtype: Any) -> list[jax.ShapeDtypeStruct]:
    if inputs.edge_features is None:
        return []
    return [jax.ShapeDtypeStruct((inputs.value.shape[1], inputs.edge_features.shape[1]), dtype)]


def _by_chunks(adjacency: Adjacency, scale: float, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    if inputs.value.size == 0:
        return _by_xla(adjacency, scale, dropout, inputs)
    return run_chunked(functools.partial(chunked_dot_attention, scale), adjacency.neighbors, dropout, inputs)


def _by_xla(adjacency: Adjacency, scale: float, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    return autocast_as("float32")(functools.partial(_attend, scale))(adjacency, dropout, inputs)


@functools.partial(jax.checkpoint, static_argnums=(0,))
def _attend(scale: float, adjacency: Adjacency, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    senders, receivers = adjacency.senders, adjacency.receivers
    logits = (receivers.read(upcast(inputs.query)) * senders.read(upcast(inputs.key))).sum(-1)
    features = None if inputs.edge_features is None else upcast(inputs.edge_features).astype(logits.dtype)
    if features is not None and inputs.edge_query is not None:
        logits = logits + (receivers.read(inputs.edge_query) * features[:, None]).sum(-1)
    logits = jnp.where(receivers.is_counted[:, None], scale * logits, -jnp.inf)
    most = finite_or_zero(jax.lax.stop_gradient(receivers.max(logits)))
    powers = jnp.exp(logits - receivers.read(most))
    sizes = receivers.sum(powers)
    weights = powers * receivers.read(reciprocal(sizes))
    if dropout is not None:
        weights = weights * dropout.of_edges(jnp.arange(len(weights))).astype(weights.dtype)
    total = receivers.sum(weights[..., None] * senders.read(upcast(inputs.value)))
    edge_total = None if features is None else receivers.sum(weights[..., None] * features[:, None])
    log_sum = jnp.where(sizes > 0, most + jnp.log(jnp.where(sizes > 0, sizes, jnp.ones_like(sizes))), 0)
    return DotResult(total, edge_total, log_sum)


def _elements_per_edge(scale: float, dropout: EdgeDropout | None, inputs: DotInputs) -> int:
    del scale, dropout
    return inputs.value.shape[1] * inputs.value.shape[2]


DOT_ATTENTION = EdgeOperation({"xla": _by_xla, "chunked": _by_chunks}, _elements_per_edge)
