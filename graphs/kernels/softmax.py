"""Chunked softmax-weighted sums, and the gradient of edge weights; shared by GAT's and GATv2's kernels."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.chunks import Chunk, add_up, largest, of_edges
from jmp_train.graphs.kernels.dropout import EdgeDropout, dropout_and_weight, times
from jmp_train.graphs.structure import CSR, accumulation_dtype, finite_or_zero, reciprocal


class SoftmaxSum(NamedTuple):
    """A sum weighted by a softmax, and what the gradient needs to compute the softmax again.

    Attributes:
      total: the sums [nodes, heads, width], in the features' dtype.
      largest: the largest logit, at least float32 [nodes, heads].
      inverse: 1 over the sum of the powers of the differences to it, of the same shape and dtype.
    """

    total: jax.Array
    largest: jax.Array
    inverse: jax.Array


def softmax_sum(
    neighbors: CSR,
    dropout: EdgeDropout | None,
    edge_weight: jax.Array | None,
    features: jax.Array,
    logits: Callable[[Chunk], jax.Array],
    elements_per_block: int,
) -> SoftmaxSum:
    """Returns the senders' features, weighted by a softmax over each node's edges.

    Args:
      neighbors: the edges, by the nodes that they enter.
      dropout: which weights are dropped.
      edge_weight: floating [edges], which multiplies the weights.
      features: floating [senders, heads, width].
      logits: makes those of a chunk, upcast [blocks, width, heads].
      elements_per_block: see `add_up`.
    """
    _, heads, width = features.shape
    dtype = accumulation_dtype(features.dtype)
    of_head = jax.ShapeDtypeStruct((heads,), dtype)

    def highest(chunk: Chunk) -> jax.Array:
        return jnp.where(chunk.is_edge[..., None], logits(chunk), -jnp.inf).max(1).astype(dtype)

    most = finite_or_zero(largest(neighbors, highest, of_head, elements_per_block))

    def parts(chunk: Chunk) -> list[jax.Array]:
        terms = chunk.where_edge(jnp.exp(logits(chunk) - chunk.of_nodes(most)).astype(dtype))
        factor = dropout_and_weight(neighbors, chunk, dropout, edge_weight, nodes_are_receivers=True)
        return [chunk.sum_of_others(features, times(terms, factor)), terms.sum(1)]

    like = [jax.ShapeDtypeStruct((heads, width), dtype), of_head]
    total, sizes = add_up(neighbors, parts, like, elements_per_block, most)
    inverse = reciprocal(sizes)
    return SoftmaxSum((total * inverse[..., None]).astype(features.dtype), most, inverse)


def gradient_of_edge_weight(
    neighbors: CSR,
    dropout: EdgeDropout | None,
    edge_weight: jax.Array | None,
    weights_and_products: Callable[[Chunk], tuple[jax.Array, jax.Array]],
    dtype: DTypeLike,
    elements_per_block: int,
) -> jax.Array | None:
    """Returns the gradient of the edge weights in their dtype, or None where there are none.

    Args:
      neighbors: see `softmax_sum`.
      dropout: see `softmax_sum`.
      edge_weight: see `softmax_sum`.
      weights_and_products: makes a chunk's softmax, and the products of the gradient and the senders' features,
        both upcast [blocks, width, heads].
      dtype: of these.
      elements_per_block: see `add_up`.
    """
    if edge_weight is None:
        return None

    def of_each(chunk: Chunk) -> jax.Array:
        weights, products = weights_and_products(chunk)
        factor = dropout_and_weight(neighbors, chunk, dropout, None, nodes_are_receivers=True)
        return (times(weights, factor) * products).sum(-1)

    of_one = jax.ShapeDtypeStruct((), dtype)
    return of_edges(neighbors, of_each, of_one, elements_per_block).astype(edge_weight.dtype)
