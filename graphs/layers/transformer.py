"""The layer of graph transformers (TransformerConv): dot-product attention over a node's edges."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.kernels import ATTENTION, Attended, AttentionInputs, DotAttention, edge_dropout
from jmp_train.graphs.layers.dense import Activation, activated, check_dropout, dense
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer, DropoutKeys
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_features,
    as_floats,
    as_graph,
    as_optional,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import Block, Graph, graph_storage, upcast
from jmp_train.policies import autocast_as


def transformer_conv(
    graph: AnyEdges,
    features: EndFeatures,
    query_weight: Floats,
    key_weight: Floats,
    value_weight: Floats,
    query_bias: Floats | None = None,
    key_bias: Floats | None = None,
    value_bias: Floats | None = None,
    *,
    num_heads: int = 1,
    edge_features: Floats | None = None,
    edge_feature_weight: Floats | None = None,
    self_weight: Floats | None = None,
    self_bias: Floats | None = None,
    gate_weight: Floats | None = None,
    concat: bool = True,
    attention_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    activation: Activation | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns attention with logits that are products of the nodes' queries and the senders' keys.

    Weights turn features into queries, keys and values. With `e = edge_features @ edge_feature_weight`, an edge
    has the logit `query[receiver] . (key[sender] + e) / sqrt(out)` and the message `value[sender] + e`. Logits, softmax
    and sums are float32. The gradient recomputes everything per edge, and `e` is never computed: its weights multiply
    the queries, and the sums of the edges' features.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`.
      query_weight: floating [in, heads * out].
      key_weight: floating [in, heads * out].
      value_weight: floating [in, heads * out].
      query_bias: floating [heads * out].
      key_bias: floating [heads * out].
      value_bias: floating [heads * out].
      num_heads: number of heads.
      edge_features: floating [edges, width].
      edge_feature_weight: floating [width, heads * out]; required if edges have features.
      self_weight: floating [in, result], weight of the node itself; None to leave the node out.
      self_bias: floating [result].
      gate_weight: floating [3 * result, 1]. The result is a weighted mean of attention and the node itself, with the
        sigmoid of the product of this weight with both and their difference; None for their sum.
      concat: True to concatenate the heads, False to average them.
      attention_dropout: the fraction of the attention weights to drop, separately for each head.
      dropout_key: for dropout; required if the rate is not 0.
      activation: a function of the result.
      implementation: see `gat_attention`.

    Returns:
      [nodes, heads * out], or [nodes, out] without `concat`, in the promoted dtype of features, weights and biases;
      half under autocast. Nodes without edges have only their own part.

    Raises:
      ValueError: a shape does not fit, a weight is missing or unused, the rate is not in [0, 1), the key is missing, or
        the graph does not support the implementation.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 0], [0, 0, 1], 2)
      >>> features, one = jnp.array([[2.0], [4.0]]), jnp.ones((1, 1))
      >>> transformer_conv(graph, features, 0 * one, one, one).ravel().tolist()
      [3.0, 2.0]

    Reference: Shi et al., Masked Label Prediction: Unified Message Passing Model for Semi-Supervised Classification,
    https://arxiv.org/abs/2009.03509; PyTorch Geometric's TransformerConv.
    """
    check_dropout("attention_dropout", attention_dropout, dropout_key)
    graph = as_graph(graph, features)
    query_weight = as_floats("query_weight", query_weight, "in", "heads * out")
    width, columns = query_weight.shape
    if num_heads < 1 or columns % num_heads:
        raise ValueError(f"num_heads={num_heads} must divide the width of query_weight, {columns}")
    out = columns if concat else columns // num_heads
    weights = [query_weight, as_floats("key_weight", key_weight, width, columns)]
    weights += [as_floats("value_weight", value_weight, width, columns)]
    named = (("query_bias", query_bias), ("key_bias", key_bias), ("value_bias", value_bias))
    biases = [as_optional(name, bias, columns) for name, bias in named]
    if self_weight is None and (self_bias is not None or gate_weight is not None):
        raise ValueError("self_bias and gate_weight need self_weight")
    own = as_optional("self_weight", self_weight, width, out), as_optional("self_bias", self_bias, out)
    gate = as_optional("gate_weight", gate_weight, 3 * out, 1)
    of_edges, kernel = _checked_edges(graph, edge_features, edge_feature_weight, columns)
    rows = end_rows(graph, features, width)
    rows, arrays = promoted_with(rows, *weights, *biases, *own, gate, kernel)
    weights, biases, (own_weight, own_bias, gate, kernel) = arrays[:3], arrays[3:6], arrays[6:]

    def table(features: jax.Array, weight: jax.Array, bias: jax.Array | None) -> jax.Array:
        return dense(features, weight, bias).reshape(-1, num_heads, columns // num_heads)

    query = table(rows.receivers, weights[0], biases[0])
    key, value = table(rows.senders, weights[1], biases[1]), table(rows.senders, weights[2], biases[2])
    edge_query = None if kernel is None else _edge_queries(query, kernel)
    senders, receivers = (graph_storage(key), graph_storage(value)), (graph_storage(query), edge_query)
    inputs = AttentionInputs(senders, receivers, of_edges)
    dropout = edge_dropout(attention_dropout, dropout_key, num_heads)
    kind = DotAttention((columns // num_heads) ** -0.5)
    attention = ATTENTION(implementation, graph.connections, kind, dropout, inputs)
    result = _combined(attention, kernel, concat).astype(rows.senders.dtype)
    if own_weight is not None:
        mine = dense(rows.receivers, own_weight, own_bias)
        result = mine + result if gate is None else _gated(result, mine, gate).astype(result.dtype)
    return activated(result, activation)


def _checked_edges(
    graph: Graph | Block, features: Floats | None, weight: Floats | None, columns: int
) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the checked features of the edges, and their weight."""
    if (features is None) != (weight is None):
        raise ValueError("edge_features and edge_feature_weight need each other")
    if features is None or weight is None:
        return None, None
    of_edges = as_edge_features(graph, features)
    return of_edges, as_floats("edge_feature_weight", weight, of_edges.shape[1], columns)


@autocast_as("float32")
def _edge_queries(query: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns [nodes, heads, features], whose products with edge features equal those of query and `e`."""
    rows = upcast(query)
    kernel = upcast(weight).reshape(-1, *query.shape[1:])
    return jnp.einsum("nhd,fhd->nhf", rows, kernel, precision="highest")


@autocast_as("float32")
def _combined(attention: Attended, weight: jax.Array | None, concat: bool) -> jax.Array:
    """Returns the combined results of senders and edges, heads concatenated or averaged, in at least float32."""
    total, *of_edges = attention.totals
    if weight is not None:
        kernel = upcast(weight).reshape(-1, *total.shape[1:])
        total = total + jnp.einsum("nhf,fhd->nhd", *of_edges, kernel, precision="highest")
    _, heads, width = total.shape
    return total.reshape(-1, heads * width) if concat else total.mean(1)


@autocast_as("float32")
def _gated(result: jax.Array, own: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns a mean of both, weighted by a gate."""
    result, own = upcast(result), upcast(own)
    gate = jax.nn.sigmoid(jnp.concatenate([result, own, result - own], 1) @ upcast(weight))
    return gate * own + (1 - gate) * result


class TransformerConv(DrawnLayer, of=transformer_conv):
    """The layer of `transformer_conv`: `layer(graph, features, edge_features=None)`.

    Weights have a Glorot uniform initializer; biases are 0.

    Args:
      in_features: the width of the features.
      out_features: the width of each head.
      num_heads: number of heads.
      edge_width: the width of the edges' features; None if they have none.
      use_bias: whether there are biases.
      use_self_weight: whether a node's own features count.
      use_gate: True to weight them by a gate, see `transformer_conv`.
      concat: see `transformer_conv`.
      attention_dropout: see `transformer_conv`; `train` and `eval` switch it on and off.
      activation: see `transformer_conv`.
      dtype: dtype to which features and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams "params" and, for dropout, "dropout".

    Raises:
      ValueError: the rate is not in [0, 1), or there is a gate without the node's own features.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = TransformerConv(4, 8, 2, edge_width=5, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4)), jnp.ones((3, 5))).shape
      (3, 16)
    """

    in_features: int
    out_features: int
    num_heads: int = 1
    _: dataclasses.KW_ONLY
    edge_width: int | None = None
    use_bias: bool = True
    use_self_weight: bool = True
    use_gate: bool = False
    concat: bool = True
    attention_dropout: float = 0.0
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        if self.use_gate and not self.use_self_weight:
            raise ValueError("use_gate=True needs use_self_weight=True")
        self.dropout_keys = DropoutKeys(rngs, attention_dropout=self.attention_dropout)
        draw, width, columns = Drawing(rngs, self.param_dtype), self.in_features, self.num_heads * self.out_features
        out = columns if self.concat else self.out_features

        def optional(is_there: bool, *shape: int) -> nnx.Param[jax.Array] | None:
            make = draw.zeros if len(shape) == 1 else functools.partial(draw, nnx.initializers.glorot_uniform())
            return nnx.data(make(*shape) if is_there else None)

        self.query_weight = optional(True, width, columns)
        self.key_weight = optional(True, width, columns)
        self.value_weight = optional(True, width, columns)
        self.query_bias = optional(self.use_bias, columns)
        self.key_bias = optional(self.use_bias, columns)
        self.value_bias = optional(self.use_bias, columns)
        self.edge_feature_weight = optional(self.edge_width is not None, self.edge_width or 0, columns)
        self.self_weight = optional(self.use_self_weight, width, out)
        self.self_bias = optional(self.use_self_weight and self.use_bias, out)
        self.gate_weight = optional(self.use_gate, 3 * out, 1)

    def __call__(
        self,
        graph: AnyEdges,
        features: EndFeatures,
        edge_features: Floats | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns the attention, see `transformer_conv`.

        Args:
          graph: see `transformer_conv`.
          features: see `transformer_conv`.
          edge_features: see `transformer_conv`.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        features, edge_features = self.cast((features, edge_features))
        dropout = self.dropout_keys(deterministic, rngs)
        return self.call(graph, features, edge_features=edge_features, **dropout)
