"""Graph attention (GAT), with whole-edge arrays or in chunks.

The kernel in chunks stores two values per node and head, and recomputes values of edges.

With the logit `s = leaky_relu(left[u] + right[v])` of an edge from u to v, its largest value m over the
edges that enter v, the inverse i of the sum of `exp(s - m)` there, and the factor k of dropout and edge
weight, the result is the sum of `a k z[u]` with `a = exp(s - m) i`. With g the gradient of the result, and
`t = g[v] . z[u]`, that of s is `a (k t - d[v])`, where `d[v]`, the sum of `a k t`, needs no second pass over the edges,
because its factor is summed in the same pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention import (
    EdgeDropout,
    Saved,
    SoftmaxSum,
    attention_operation,
    dropout_and_weight,
    gradient_of_edge_weight,
    softmax_sum,
    times,
)
from jmp_train.graphs.kernels.chunks import Chunk, add_up, sum_of_rows
from jmp_train.graphs.kernels.native_calls import native_gat, native_gat_gradient, on_cpus, takes
from jmp_train.graphs.structure import CSR, Adjacency, CSRAndCSC, upcast


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GATInputs:
    """The inputs of attention.

    Attributes:
      features: floating [nodes, heads, width].
      left: floating [nodes, heads].
      right: floating [nodes, heads].
      edge_weight: floating [edges], or None.
    """

    features: jax.Array
    left: jax.Array
    right: jax.Array
    edge_weight: jax.Array | None

    @property
    def sent(self) -> jax.Array:
        """The messages of the nodes [nodes, heads, width]."""
        return self.features


_Saved = Saved[GATInputs]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def chunked_gat(negative_slope: float, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: GATInputs) -> jax.Array:
    """Returns attention [nodes, heads, width] in the features' dtype."""
    return _forward(negative_slope, edges, dropout, inputs)[0]


def _forward(
    negative_slope: float, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: GATInputs
) -> tuple[jax.Array, _Saved]:
    forward = functools.partial(_chunked_forward, negative_slope)
    arguments = edges.by_target, dropout, inputs
    if _is_native(edges.by_target, dropout, inputs):
        result = on_cpus(functools.partial(_native_forward, negative_slope), forward, *arguments)
    else:
        result = forward(*arguments)
    return result.total, Saved(edges, dropout, inputs, result.largest, result.inverse)


def _is_native(neighbors: CSR, dropout: EdgeDropout | None, inputs: GATInputs) -> bool:
    return dropout is None and inputs.edge_weight is None and takes(inputs.features.dtype, neighbors, inputs)


def _native_forward(negative_slope: float, neighbors: CSR, dropout: None, inputs: GATInputs) -> SoftmaxSum:
    del dropout
    return SoftmaxSum(
        *native_gat(negative_slope, neighbors, inputs.features, upcast(inputs.left), upcast(inputs.right))
    )


def _native_backward(negative_slope: float, saved: _Saved, gradient: jax.Array) -> GATInputs:
    edges, _, inputs, most, inverse = saved
    ends = upcast(inputs.left), upcast(inputs.right)
    of_features, of_left, of_right = native_gat_gradient(
        negative_slope, edges.by_target, edges.by_source, inputs.features, *ends, most, inverse, gradient
    )
    return GATInputs(of_features, of_left.astype(inputs.left.dtype), of_right.astype(inputs.right.dtype), None)


def _chunked_forward(
    negative_slope: float, neighbors: CSR, dropout: EdgeDropout | None, inputs: GATInputs
) -> SoftmaxSum:
    features = inputs.features

    def logits(chunk: Chunk) -> jax.Array:
        sums = chunk.of_others(inputs.left) + chunk.of_nodes(inputs.right)
        return jax.nn.leaky_relu(sums, negative_slope)

    _, heads, width = features.shape
    elements = heads * (width + 2 * neighbors.width)
    return softmax_sum(neighbors, dropout, inputs.edge_weight, features, logits, elements)


def _backward(negative_slope: float, saved: _Saved, gradient: jax.Array) -> tuple[None, None, GATInputs]:
    backward = functools.partial(_chunked_backward, negative_slope)
    if not _is_native(saved.edges.by_source, saved.dropout, saved.inputs):
        return None, None, backward(saved, gradient)
    return None, None, on_cpus(functools.partial(_native_backward, negative_slope), backward, saved, gradient)


def _chunked_backward(negative_slope: float, saved: _Saved, gradient: jax.Array) -> GATInputs:
    edges, dropout, inputs, most, inverse = saved
    features, left, right, edge_weight = (
        inputs.features,
        inputs.left,
        inputs.right,
        inputs.edge_weight,
    )
    _, heads, width = features.shape
    dtype = most.dtype
    of_head = jax.ShapeDtypeStruct((heads,), dtype)

    def weights(chunk: Chunk, sums: jax.Array, shift: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the softmax's weights and their derivative's slopes [blocks, width, heads]."""
        logits = jax.nn.leaky_relu(sums, negative_slope)
        of_softmax = chunk.where_edge((jnp.exp(logits - shift) * scale).astype(dtype))
        return of_softmax, jnp.where(sums >= 0, of_softmax, negative_slope * of_softmax)

    into = edges.by_target

    def into_node(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        sums = chunk.of_others(left) + chunk.of_nodes(right)
        return weights(chunk, sums, chunk.of_nodes(most), chunk.of_nodes(inverse))

    def of_receivers(chunk: Chunk) -> list[jax.Array]:
        of_softmax, slopes = into_node(chunk)
        factor = dropout_and_weight(into, chunk, dropout, edge_weight, nodes_are_receivers=True)
        here = chunk.of_nodes(gradient)[:, 0]
        # A product of sums is cheaper than the sum of the edges' products, which XLA stores on CPUs.
        rows = [chunk.sum_of_others(features, times(x, factor)) for x in (of_softmax, slopes)]
        return [*(sum_of_rows(x * here) for x in rows), slopes.sum(1)]

    elements = heads * (2 * width + 3 * into.width)
    mean, of_products, of_slopes = add_up(into, of_receivers, [of_head] * 3, elements, gradient)
    of_right = of_products - mean * of_slopes

    out = edges.by_source

    def of_senders(chunk: Chunk) -> list[jax.Array]:
        sums = chunk.of_others(right) + chunk.of_nodes(left)
        of_softmax, slopes = weights(chunk, sums, chunk.of_others(most), chunk.of_others(inverse))
        factor = dropout_and_weight(out, chunk, dropout, edge_weight, nodes_are_receivers=False)
        rows = chunk.sum_of_others(gradient, times(slopes, factor))
        of_logits = sum_of_rows(rows * chunk.of_nodes(features)[:, 0])
        of_means = (slopes * chunk.of_others(mean)).sum(1)
        return [
            chunk.sum_of_others(gradient, times(of_softmax, factor)),
            of_logits - of_means,
        ]

    like = [jax.ShapeDtypeStruct((heads, width), dtype), of_head]
    elements = heads * (2 * width + 3 * out.width)
    of_features, of_left = add_up(out, of_senders, like, elements, mean)

    def weights_and_products(chunk: Chunk) -> tuple[jax.Array, jax.Array]:
        return into_node(chunk)[0], chunk.dot_with_others(features, gradient)

    elements = heads * width * into.width // 2
    of_weight = gradient_of_edge_weight(into, dropout, edge_weight, weights_and_products, dtype, elements)
    return GATInputs(
        of_features.astype(features.dtype),
        of_left.astype(left.dtype),
        of_right.astype(right.dtype),
        of_weight,
    )


chunked_gat.defvjp(_forward, _backward)


def _logits_and_messages(negative_slope: float, adjacency: Adjacency, inputs: GATInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the logits [edges, heads] and the messages [edges, heads, width]."""
    left = adjacency.senders.read(upcast(inputs.left))
    logits = jax.nn.leaky_relu(left + adjacency.receivers.read(upcast(inputs.right)), negative_slope)
    return logits, adjacency.senders.read(upcast(inputs.features))


GAT = attention_operation(_logits_and_messages, chunked_gat)
