"""GATv2 attention, with whole-edge arrays or in chunks: like `gat`, with logits from a small network of both ends.

The logit of an edge from u to v is the sum over the width of `attention * leaky_relu(left[u] + right[v])`.
With its gradient `e = a (k t - d[v])`, and `q` the sum of `e` times the slopes of `leaky_relu` over the
edges of a node, the gradient of that node's row is `attention * q`, and that of `attention` the sum over
all nodes of `left * q` and `right * q`, since `leaky_relu(y)` is its slope times y.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention import (
    EdgeDropout,
    Saved,
    attention_operation,
    dropout_and_weight,
    gradient_of_edge_weight,
    softmax_sum,
    times,
)
from jmp_train.graphs.kernels.chunks import Chunk, add_up, sum_of_rows
from jmp_train.graphs.structure import BLOCK, Adjacency, CSRAndCSC, upcast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GATv2Inputs:
    """The inputs of attention.

    Attributes:
      left: floating [nodes, heads, width].
      right: floating [nodes, heads, width].
      attention: floating [heads, width].
      edge_weight: floating [edges], or None.
    """

    left: jax.Array
    right: jax.Array
    attention: jax.Array
    edge_weight: jax.Array | None

    @property
    def sent(self) -> jax.Array:
        """The messages of the nodes [nodes, heads, width]."""
        return self.left


_Saved = Saved[GATv2Inputs]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_gatv2(
    negative_slope: float, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: GATv2Inputs
) -> jax.Array:
    """Returns attention [nodes, heads, width] in the dtype of `left`."""
    return _forward(negative_slope, edges, dropout, inputs)[0]


def _forward(
    negative_slope: float, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: GATv2Inputs
) -> tuple[jax.Array, _Saved]:
    neighbors, left = edges.by_target, inputs.left

    def logits(chunk: Chunk) -> jax.Array:
        sums = chunk.of_others(left) + chunk.of_nodes(inputs.right)
        return _logits(sums, inputs, negative_slope)

    _, heads, width = left.shape
    elements = neighbors.width * heads * width // 2
    result = softmax_sum(neighbors, dropout, inputs.edge_weight, left, logits, elements)
    saved = Saved(edges, dropout, inputs, result.largest, result.inverse)
    return result.total, saved


def _backward(negative_slope: float, saved: _Saved, gradient: jax.Array) -> tuple[None, None, GATv2Inputs]:
    edges, dropout, inputs, most, inverse = saved
    left, right, edge_weight = inputs.left, inputs.right, inputs.edge_weight
    _, heads, width = left.shape
    dtype = most.dtype
    of_head = jax.ShapeDtypeStruct((heads,), dtype)
    of_row = jax.ShapeDtypeStruct((heads, width), dtype)

    def softmax(chunk: Chunk, sums: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
        logits = _logits(sums, inputs, negative_slope)
        return chunk.where_edge((jnp.exp(logits - shift) * scale).astype(dtype))

    into = edges.by_target

    def into_node(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        """Returns the softmax's weights and their gradients [blocks, width, heads]."""
        sums = chunk.of_others(left) + chunk.of_nodes(right)
        weights = softmax(chunk, sums, chunk.of_nodes(most), chunk.of_nodes(inverse))
        return weights, chunk.where_edge(chunk.dot_with_others(left, gradient))

    def of_means(chunk: Chunk) -> list[jax.Array]:
        weights, products = into_node(chunk)
        factor = dropout_and_weight(into, chunk, dropout, edge_weight, nodes_are_receivers=True)
        return [(weights * times(products, factor)).sum(1)]

    elements = into.width * heads * width // 2
    (mean,) = add_up(into, of_means, [of_head], elements, gradient)

    def of_receivers(chunk: Chunk) -> list[jax.Array]:
        weights, products = into_node(chunk)
        factor = dropout_and_weight(into, chunk, dropout, edge_weight, nodes_are_receivers=True)
        of_logits = weights * (times(products, factor) - chunk.of_nodes(mean))
        here = chunk.of_nodes(right)[:, 0]
        return [chunk.sum_of_others(left, of_logits, lambda x: _slopes(x + here, negative_slope))]

    (into_slopes,) = add_up(into, of_receivers, [of_row], elements, mean)

    out = edges.by_source

    def of_senders(chunk: Chunk) -> list[jax.Array]:
        sums = chunk.of_others(right) + chunk.of_nodes(left)
        weights = softmax(chunk, sums, chunk.of_others(most), chunk.of_others(inverse))
        factor = dropout_and_weight(out, chunk, dropout, edge_weight, nodes_are_receivers=False)
        products = times(chunk.where_edge(chunk.dot_with_others(gradient, left)), factor)
        of_logits = weights * (products - chunk.of_others(mean))
        here = chunk.of_nodes(left)[:, 0]
        return [
            chunk.sum_of_others(gradient, times(weights, factor)),
            chunk.sum_of_others(right, of_logits, lambda x: _slopes(x + here, negative_slope)),
        ]

    of_messages, out_slopes = add_up(out, of_senders, [of_row] * 2, elements, into_slopes)
    attention = upcast(inputs.attention)
    of_attention = _total(upcast(left) * out_slopes) + _total(upcast(right) * into_slopes)

    of_weight = gradient_of_edge_weight(into, dropout, edge_weight, into_node, dtype, elements)
    of_inputs = GATv2Inputs(
        (of_messages + attention * out_slopes).astype(left.dtype),
        (attention * into_slopes).astype(right.dtype),
        of_attention.astype(inputs.attention.dtype),
        of_weight,
    )
    return None, None, of_inputs


chunked_gatv2.defvjp(_forward, _backward)


def _logits(sums: jax.Array, inputs: GATv2Inputs, negative_slope: float) -> jax.Array:
    attention = inputs.attention.astype(sums.dtype)
    return sum_of_rows(attention * jax.nn.leaky_relu(sums, negative_slope))


def _slopes(sums: jax.Array, negative_slope: float) -> jax.Array:
    one = jnp.ones_like(sums)
    return jnp.where(sums >= 0, one, negative_slope * one)


def _total(rows: jax.Array) -> jax.Array:
    """Returns the sum over the first axis, in blocks of blocks."""
    while rows.shape[0] > 1:
        pad = [(0, -rows.shape[0] % BLOCK)] + [(0, 0)] * (rows.ndim - 1)
        blocks = jnp.pad(rows, pad).reshape(-1, BLOCK, *rows.shape[1:])
        rows = jax.lax.optimization_barrier(blocks.sum(1))  # XLA would join the sums to one
    return rows.sum(0)


def _logits_and_messages(
    negative_slope: float, adjacency: Adjacency, inputs: GATv2Inputs
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits [edges, heads] and the messages [edges, heads, width]."""
    messages = adjacency.senders.read(upcast(inputs.left))
    both = messages + adjacency.receivers.read(upcast(inputs.right))
    both = jax.nn.leaky_relu(both, negative_slope)
    return (inputs.attention.astype(both.dtype) * both).sum(-1), messages


GATV2 = attention_operation(_logits_and_messages, chunked_gatv2)
