"""The attentions: small functions of one edge, from u to v, for whole arrays of edges and for chunks.

GAT's logits are `leaky_relu(left[u] + right[v])`, GATv2's the sums over the width of
`attention * leaky_relu(left[u] + right[v])`. Dot-product attention has `scale q[v] . (k[u] + W f)`, and the value of an
edge is `z[u] + W f`, where `f` are the features of the edge and `W` is a matrix. It does not need `W`: `q[v] . W f` is
the product of `f` and a row of v, the edge's query, and the caller multiplies the weighted sum of `f` by `W`. The
logarithms of the softmaxes' sums, which have gradients, allow joining several softmaxes of one node.
"""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention import (
    Attention,
    OfEdge,
    SoftmaxSums,
    attention_by_xla,
    attention_sums,
    factor_of,
)
from jmp_train.graphs.kernels.edge_programs import EdgeIds, Ends
from jmp_train.graphs.kernels.gat import GATAttention
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.kernels.threefry_dropout import EdgeDropout
from jmp_train.graphs.structure import Adjacency


class GATInputs(NamedTuple):
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


class GATv2Inputs(NamedTuple):
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


class DotInputs(NamedTuple):
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


@dataclasses.dataclass(frozen=True)
class _GATv2(Attention):
    negative_slope: float

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> OfEdge:
        both = jax.nn.leaky_relu(inputs.senders + inputs.receivers, self.negative_slope)
        logits = (inputs.shared.astype(both.dtype) * both).sum(-1)
        return OfEdge(logits, [inputs.senders], factor_of(fixed.shared, ids, inputs.edge))


@dataclasses.dataclass(frozen=True)
class _Dot(Attention):
    scale: float

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> OfEdge:
        (key, value), (query, edge_query), features = inputs[:3]
        logits, messages = (query * key).sum(-1), [value]
        if features is not None:
            features = features.astype(value.dtype)
            messages.append(jnp.broadcast_to(features, (len(value), len(features))))
            if edge_query is not None:
                logits = logits + (edge_query * features).sum(-1)
        return OfEdge(self.scale * logits, messages, factor_of(fixed.shared, ids, None))


def _gat_ends(inputs: GATInputs) -> Ends:
    return Ends((inputs.features, inputs.left), inputs.right, inputs.edge_weight)


def _gatv2_ends(inputs: GATv2Inputs) -> Ends:
    return Ends(inputs.left, inputs.right, inputs.edge_weight, inputs.attention)


def _operation(kind: Any, ends_of: Any) -> EdgeOperation[[float, EdgeDropout | None, Any], jax.Array]:
    """Returns attention [nodes, heads, width] in the dtype of its messages, as an operation."""

    def by_xla(adjacency: Adjacency, slope: float, dropout: EdgeDropout | None, inputs: Any) -> jax.Array:
        found = attention_by_xla(kind(slope), adjacency, Ends(shared=dropout), ends_of(inputs))
        return found.totals[0].astype(inputs[0].dtype)

    def by_chunks(adjacency: Adjacency, slope: float, dropout: EdgeDropout | None, inputs: Any) -> jax.Array:
        sent = inputs[0]
        if sent.size == 0:
            return jnp.zeros((adjacency.num_receivers, *sent.shape[1:]), sent.dtype)
        return attention_sums(kind(slope), sent.dtype, adjacency, Ends(shared=dropout), ends_of(inputs)).totals[0]

    def elements(slope: float, dropout: EdgeDropout | None, inputs: Any) -> int:
        del slope, dropout
        return inputs[0].shape[1] * inputs[0].shape[2]

    return EdgeOperation({"xla": by_xla, "chunked": by_chunks}, elements)


GAT = _operation(GATAttention, _gat_ends)
GATV2 = _operation(_GATv2, _gatv2_ends)


def _dot(run: Any, adjacency: Adjacency, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    ends = Ends((inputs.key, inputs.value), (inputs.query, inputs.edge_query), inputs.edge_features)
    found: SoftmaxSums = run(adjacency, Ends(shared=dropout), ends)
    total, *more = found.totals
    return DotResult(total, more[0] if more else None, found.log_sum)


def _dot_by_xla(adjacency: Adjacency, scale: float, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    return _dot(lambda *arguments: attention_by_xla(_Dot(scale), *arguments), adjacency, dropout, inputs)


def _dot_by_chunks(adjacency: Adjacency, scale: float, dropout: EdgeDropout | None, inputs: DotInputs) -> DotResult:
    if inputs.value.size == 0:
        return _dot_by_xla(adjacency, scale, dropout, inputs)
    return _dot(lambda *arguments: attention_sums(_Dot(scale), None, *arguments), adjacency, dropout, inputs)


def _dot_elements(scale: float, dropout: EdgeDropout | None, inputs: DotInputs) -> int:
    del scale, dropout
    return inputs.value.shape[1] * inputs.value.shape[2]


DOT_ATTENTION = EdgeOperation({"xla": _dot_by_xla, "chunked": _dot_by_chunks}, _dot_elements)
