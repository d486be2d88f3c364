"""The attention of GATv2, that of products, and that of GAT.

For an edge from u to v, GATv2's logits are the sums over the width of `attention * leaky_relu(left[u] + right[v])`.
Those of products are `scale q[v] . (k[u] + W f)`, and the value of an edge is `z[u] + W f`, where `f` are the features
of the edge and `W` is a matrix. The kernel does not need `W`: `q[v] . W f` is the product of `f` and a row of v, the
edge's query, and the caller multiplies the weighted sum of `f` by `W`. The logarithms of the softmaxes' sums, which
have gradients, allow joining several softmaxes of one node.

GAT's logits are `leaky_relu(left[u] + right[v])`. It has its own gradient, and native kernels. With the names of
`attention.py`, `d[v]`, the sum of `a k t`, needs no second pass over the edges: a logit's gradient `a (k t - d[v])` is
added at v in two sums, and d, the factor of one, is summed in the same pass.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.attention import (
    Add,
    Attention,
    AttentionInputs,
    EdgeDropout,
    Side,
    Softmax,
    of_weights,
    times,
)
from jmp_train.graphs.kernels.chunks import Chunk, add_up, sum_of_rows
from jmp_train.graphs.kernels.native_calls import native_gat, native_gat_gradient, on_cpus, takes
from jmp_train.graphs.structure import CSR, CSRAndCSC, upcast


@dataclasses.dataclass(frozen=True)
class GATv2(Attention):
    """The attention of GATv2: senders, receivers and what is shared are [..., heads, width]."""

    negative_slope: float

    def __call__(self, rows: AttentionInputs, add: Add = sum_of_rows) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits and messages."""
        both = jax.nn.leaky_relu(rows.senders + rows.receivers, self.negative_slope)
        return add(rows.shared.astype(both.dtype) * both), [rows.senders]


@dataclasses.dataclass(frozen=True)
class DotAttention(Attention):
    """The attention of products; senders are (key, value), receivers (query, edge's query or None)."""

    scale: float
    is_exact = True

    def __call__(self, rows: AttentionInputs, add: Add = sum_of_rows) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits and messages."""
        (key, value), (query, edge_query), features = rows[:3]
        logits, messages = add(key * query), [value]
        if features is not None:
            features = features[..., None, :].astype(value.dtype)
            messages.append(jnp.broadcast_to(features, (*logits.shape, features.shape[-1])))
            logits = logits if edge_query is None else logits + (edge_query * features).sum(-1)
        return self.scale * logits, messages


@dataclasses.dataclass(frozen=True)
class GAT(Attention):
    """The attention of GAT; senders are (features, left), receivers `right`, floating [..., heads]."""

    negative_slope: float

    def __call__(self, rows: AttentionInputs, add: Add = sum_of_rows) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits and messages."""
        del add
        features, left = rows.senders
        return jax.nn.leaky_relu(left + rows.receivers, self.negative_slope), [features]

    def elements(self, neighbors: CSR, inputs: AttentionInputs) -> int:
        """Returns the number of elements that a block computes without a gradient."""
        _, heads, width = inputs.senders[0].shape
        return heads * (width + 2 * neighbors.width)

    def sums(
        self, dtype: DTypeLike, neighbors: CSR, dropout: EdgeDropout | None, inputs: AttentionInputs
    ) -> tuple[list[jax.Array], Softmax]:
        """Returns the weighted sums, and what the gradient needs."""

        def native(neighbors: CSR, dropout: None, inputs: AttentionInputs) -> tuple[list[jax.Array], Softmax]:
            del dropout
            features, left = inputs.senders
            ends = upcast(left), upcast(inputs.receivers)
            total, largest, inverse = native_gat(self.negative_slope, neighbors, features, *ends)
            return [total], Softmax(largest, inverse)

        chunked = functools.partial(super().sums, dtype)
        is_native = _is_native(neighbors, dropout, inputs)
        run = functools.partial(on_cpus, native, chunked) if is_native else chunked
        return run(neighbors, dropout, inputs)

    def gradients(
        self, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: AttentionInputs, softmax: Softmax
    ) -> AttentionInputs:
        """Returns the gradients of the inputs."""

        def native(edges: CSRAndCSC, dropout: None, inputs: AttentionInputs, softmax: Softmax) -> AttentionInputs:
            del dropout
            (features, left), right = inputs[:2]
            of_features, of_left, of_right = native_gat_gradient(
                self.negative_slope,
                edges.by_target,
                edges.by_source,
                features,
                upcast(left),
                upcast(right),
                *softmax[:2],
                softmax.of_totals[0],
            )
            return AttentionInputs((upcast(of_features), of_left), of_right)  # as chunks do

        is_native = _is_native(edges.by_source, dropout, inputs)
        run = functools.partial(on_cpus, native, self._swapped) if is_native else self._swapped
        return run(edges, dropout, inputs, softmax)

    def _swapped(
        self, edges: CSRAndCSC, dropout: EdgeDropout | None, inputs: AttentionInputs, softmax: Softmax
    ) -> AttentionInputs:
        """Returns the gradients; products of sums are cheaper than sums of products, which XLA stores on CPUs."""
        (features, _), (gradient,) = inputs.senders, softmax.of_totals
        _, heads, width = features.shape
        of_row, of_head = (jax.ShapeDtypeStruct(features.shape[1 : 3 - i], softmax.largest.dtype) for i in (0, 1))

        def slopes(side: Side, chunk: Chunk) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Returns weights, slopes of the softmax, and shifts."""
            rows, softmax = side.rows(chunk)
            both = rows.senders[1] + rows.receivers
            logits = jax.nn.leaky_relu(both, self.negative_slope)
            weights = chunk.where_edge(jnp.exp(logits - softmax.largest) * softmax.inverse)
            return weights, jnp.where(both >= 0, weights, self.negative_slope * weights), softmax.shift

        def of_receivers(chunk: Chunk) -> list[jax.Array]:
            weights, sloped, _ = slopes(into, chunk)
            here, factor = chunk.of_nodes(gradient)[:, 0], into.factor(chunk)
            sums = [sum_of_rows(chunk.sum_of_others(features, times(x, factor)) * here) for x in (weights, sloped)]
            return [*sums, sloped.sum(1)]

        def of_senders(chunk: Chunk) -> list[jax.Array]:
            weights, sloped, shift = slopes(out, chunk)
            factor = out.factor(chunk)
            sums = [chunk.sum_of_others(gradient, times(x, factor)) for x in (weights, sloped)]
            of_left = sum_of_rows(sums[1] * chunk.of_nodes(features)[:, 0]) - (sloped * shift).sum(1)
            return [sums[0], of_left]

        into = Side(edges.by_target, dropout, inputs, softmax)
        elements = heads * (2 * width + 3 * into.neighbors.width)
        mean, of_products, of_slopes = add_up(into.neighbors, of_receivers, [of_head] * 3, elements, gradient)
        out = Side(edges.by_source, dropout, inputs, softmax._replace(shift=mean), False)
        of_features = add_up(out.neighbors, of_senders, [of_row, of_head], elements, mean)
        return AttentionInputs(tuple(of_features), of_products - mean * of_slopes, weight=of_weights(self, into))


def _is_native(neighbors: CSR, dropout: EdgeDropout | None, inputs: AttentionInputs) -> bool:
    return dropout is None and inputs.weight is None and takes(inputs.senders[0].dtype, neighbors, inputs)
