"""Graph attention (GAT): neighbors' features, weighted by a softmax of both ends' logits.

With dynamic logits (GATv2), the ranking of neighbors depends on the node.
"""

import dataclasses

import jax
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.attention import gat_attention, gatv2_attention
from jmp_train.graphs.layers.dense import Activation, activated, check_dropout, dense, product, split_key, with_bias
from jmp_train.graphs.layers.layer import Drawing, DropoutConvolution, DropoutKeys
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_floats,
    as_graph,
    as_optional,
    check_in_degrees,
    checked_residual,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import upcast
from jmp_train.policies import autocast_as


def gat_conv(
    graph: AnyEdges,
    features: EndFeatures,
    weight: Floats,
    left: Floats,
    right: Floats,
    bias: Floats | None = None,
    *,
    residual: bool = False,
    residual_weight: Floats | None = None,
    edge_weight: Floats | None = None,
    negative_slope: float = 0.2,
    feature_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    activation: Activation | None = None,
    allow_zero_in_degree: bool = False,
) -> jax.Array:
    """Returns multi-head graph attention over features times weights.

    With `z = features @ weight`, an edge has the logit `leaky_relu(sum(left * z[sender]) + sum(right *
    z[receiver]))`. Logits are float32 even under autocast, where z is half, because rounding them would flip
    the gradient's sign at the kink.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`; or,
        `SparseFeatures`, also for a block.
      weight: floating [in, heads * out].
      left: floating [1, heads, out], for the senders.
      right: floating [1, heads, out], for the receivers.
      bias: floating [heads * out].
      residual: whether the features are added to the result.
      residual_weight: floating [in, heads * out], the weight of the residual; None if features have
        the result's width.
      edge_weight: floating [edges], factors of the weights after the softmax.
      negative_slope: slope of the leaky ReLU below 0.
      feature_dropout: the fraction of the features' entries to drop.
      attention_dropout: the fraction of the weights to drop, separately for each head.
      dropout_key: for dropout; required if a rate is not 0.
      activation: a function of the result.
      allow_zero_in_degree: True to allow nodes without incoming edges; they get residual and bias.

    Returns:
      [nodes, heads, out] in the promoted dtype of features, weights and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, a rate is not in [0, 1), the key is missing, or some node has no incoming
        edge.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 0], [0, 0, 1], 2)
      >>> features, one, zero = jnp.array([[2.0], [4.0]]), jnp.ones((1, 1)), jnp.zeros((1, 1, 1))
      >>> gat_conv(graph, features, one, zero, zero).ravel().tolist()
      [3.0, 2.0]

    Reference: Velickovic et al., Graph Attention Networks, https://arxiv.org/abs/1710.10903; DGL's GATConv.
    """
    check_dropout("feature_dropout", feature_dropout, dropout_key)
    check_dropout("attention_dropout", attention_dropout, dropout_key)
    graph = as_graph(graph, features)
    check_in_degrees(graph, allow_zero_in_degree)
    left = as_floats("left", left, 1, "heads", "out")
    _, heads, out = left.shape
    right = as_floats("right", right, 1, heads, out)
    kernel = as_floats("weight", weight, "in", heads * out)
    width = kernel.shape[0]
    rows = end_rows(graph, features, width, can_be_sparse=not residual or residual_weight is not None)
    residual_kernel = checked_residual(residual, residual_weight, width, heads * out)
    offset = as_optional("bias", bias, heads * out)
    rows, (kernel, residual_kernel, offset) = promoted_with(rows, kernel, residual_kernel, offset)
    feature_key, attention_key = split_key(dropout_key)
    rows = rows.dropped(feature_dropout, feature_key)

    tables = rows.map(lambda features: product(features, kernel).reshape(-1, heads, out))
    result = gat_attention(
        graph,
        tables.senders,
        _logits(tables.senders, left),
        _logits(tables.receivers, right),
        edge_weight=edge_weight,
        negative_slope=negative_slope,
        dropout_rate=attention_dropout,
        dropout_key=attention_key,
    ).reshape(-1, heads * out)
    if residual:
        own = lambda features: features if residual_kernel is None else product(features, residual_kernel)
        result = result + rows.of_receivers(own)
    result = with_bias(result, offset)
    return activated(result.reshape(-1, heads, out), activation)


@autocast_as("float32")
@jax.checkpoint
def _logits(table: jax.Array, vector: jax.Array) -> jax.Array:
    """Returns a node's part of the logits [nodes, heads], in float32."""
    rows = upcast(table)
    return (rows * vector.astype(rows.dtype)).sum(-1)


class GATConv(DropoutConvolution, of=gat_conv):
    """The layer of `gat_conv`: `layer(graph, features, edge_weight=None)`.

    Weights and vectors have a Glorot normal initializer with gain sqrt(2); the bias is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result in each head.
      num_heads: number of heads.
      feature_dropout: see `gat_conv`; `train` and `eval` switch it on and off.
      attention_dropout: see `gat_conv`; `train` and `eval` switch it on and off.
      negative_slope: see `gat_conv`.
      residual: see `gat_conv`; if the widths differ, it has a weight.
      activation: see `gat_conv`.
      allow_zero_in_degree: see `gat_conv`.
      use_bias: whether there is a bias.
      dtype: dtype to which features, weights and bias are cast; None for their promoted dtype. The two vectors
        are not cast.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams "params" and, for dropout, "dropout".

    Raises:
      ValueError: a rate is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = GATConv(4, 8, 2, attention_dropout=0.6, rngs=nnx.Rngs(0))
      >>> layer.eval()
      >>> layer(graph, jnp.ones((3, 4))).shape
      (3, 2, 8)
    """

    uncast = ("left", "right")
    in_features: int
    out_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    feature_dropout: float = 0.0
    attention_dropout: float = 0.0
    negative_slope: float = 0.2
    residual: bool = False
    activation: Activation | None = None
    allow_zero_in_degree: bool = False
    use_bias: bool = True

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        rates = {"feature_dropout": self.feature_dropout, "attention_dropout": self.attention_dropout}
        self.dropout_keys = DropoutKeys(rngs, **rates)
        draw, width = Drawing(rngs, self.param_dtype), self.num_heads * self.out_features
        has_weight = self.residual and self.in_features != width
        self.weight = draw.glorot(self.in_features, width)
        self.left = draw.glorot(1, self.num_heads, self.out_features)
        self.right = draw.glorot(1, self.num_heads, self.out_features)
        self.residual_weight = nnx.data(draw.glorot(self.in_features, width) if has_weight else None)
        self.bias = nnx.data(draw.zeros(width) if self.use_bias else None)


def gatv2_conv(
    graph: AnyEdges,
    features: EndFeatures,
    left_weight: Floats,
    attention: Floats,
    right_weight: Floats | None = None,
    left_bias: Floats | None = None,
    right_bias: Floats | None = None,
    *,
    residual: bool = False,
    residual_weight: Floats | None = None,
    residual_bias: Floats | None = None,
    edge_weight: Floats | None = None,
    negative_slope: float = 0.2,
    feature_dropout: float = 0.0,
    attention_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    activation: Activation | None = None,
    allow_zero_in_degree: bool = False,
) -> jax.Array:
    """Returns multi-head graph attention with logits from a small network of both ends.

    With `left = features @ left_weight + left_bias`, and `right` likewise, an edge has the logit
    `sum(attention * leaky_relu(left[sender] + right[receiver]))` and the message `left[sender]`. Logits are
    float32 even under autocast.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`; or,
        `SparseFeatures`, also for a block.
      left_weight: floating [in, heads * out], for the senders.
      attention: floating [1, heads, out].
      right_weight: floating [in, heads * out], for the receivers; None for weight and bias of the
        senders.
      left_bias: floating [heads * out].
      right_bias: floating [heads * out].
      residual: see `gat_conv`.
      residual_weight: see `gat_conv`.
      residual_bias: floating [heads * out], added to the product with `residual_weight`.
      edge_weight: see `gat_conv`.
      negative_slope: see `gat_conv`.
      feature_dropout: see `gat_conv`.
      attention_dropout: see `gat_conv`.
      dropout_key: see `gat_conv`.
      activation: see `gat_conv`.
      allow_zero_in_degree: True to allow nodes without incoming edges; they get the residual.

    Returns:
      [nodes, heads, out] in the promoted dtype of features, weights and biases; half under autocast.

    Raises:
      ValueError: see `gat_conv`; or there is a bias without its weight.
      TypeError: see `gat_conv`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 0], [0, 0, 1], 2)
      >>> features, one = jnp.array([[2.0], [4.0]]), jnp.ones((1, 1))
      >>> gatv2_conv(graph, features, one, jnp.zeros((1, 1, 1))).ravel().tolist()
      [3.0, 2.0]

    Reference: Brody et al., How Attentive are Graph Attention Networks?,
    https://arxiv.org/abs/2105.14491; DGL's GATv2Conv.
    """
    check_dropout("feature_dropout", feature_dropout, dropout_key)
    check_dropout("attention_dropout", attention_dropout, dropout_key)
    graph = as_graph(graph, features)
    check_in_degrees(graph, allow_zero_in_degree)
    attention = as_floats("attention", attention, 1, "heads", "out")
    _, heads, out = attention.shape
    left_weight = as_floats("left_weight", left_weight, "in", heads * out)
    width, columns = left_weight.shape
    rows = end_rows(graph, features, width, can_be_sparse=not residual or residual_weight is not None)
    residual_weight = checked_residual(residual, residual_weight, width, columns)
    rows, arrays = promoted_with(
        rows,
        *_checked_pair("left", left_weight, left_bias, width, columns),
        *_checked_pair("right", right_weight, right_bias, width, columns),
        *_checked_pair("residual", residual_weight, residual_bias, width, columns),
    )
    feature_key, attention_key = split_key(dropout_key)
    rows = rows.dropped(feature_dropout, feature_key)

    tables = rows.map(lambda features: dense(features, *arrays[:2]).reshape(-1, heads, out))
    right = tables.receivers
    if right_weight is not None:
        right = rows.of_receivers(lambda features: dense(features, *arrays[2:4])).reshape(-1, heads, out)
    result = gatv2_attention(
        graph,
        tables.senders,
        right,
        attention.reshape(heads, out),
        edge_weight=edge_weight,
        negative_slope=negative_slope,
        dropout_rate=attention_dropout,
        dropout_key=attention_key,
    )
    if residual:
        own = rows.of_receivers(lambda features: features if residual_weight is None else dense(features, *arrays[4:]))
        result = result + own.reshape(-1, heads, out)
    return activated(result, activation)


def _checked_pair(
    name: str, weight: Floats | None, bias: Floats | None, width: int, out: int
) -> tuple[jax.Array | None, jax.Array | None]:
    if weight is None and bias is not None:
        raise ValueError(f"{name}_bias needs {name}_weight")
    return (
        as_optional(f"{name}_weight", weight, width, out),
        as_optional(f"{name}_bias", bias, out),
    )


class GATv2Conv(DropoutConvolution, of=gatv2_conv):
    """The layer of `gatv2_conv`: `layer(graph, features, edge_weight=None)`.

    Weights and vectors have a Glorot normal initializer with gain sqrt(2); biases are 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result in each head.
      num_heads: number of heads.
      feature_dropout: see `gatv2_conv`; `train` and `eval` switch it on and off.
      attention_dropout: see `gatv2_conv`; `train` and `eval` switch it on and off.
      negative_slope: see `gatv2_conv`.
      residual: see `gatv2_conv`; if the widths differ, it has a weight, and a bias if there are any.
      activation: see `gatv2_conv`.
      allow_zero_in_degree: see `gatv2_conv`.
      use_bias: whether there are biases.
      share_weights: whether senders and receivers have the same weight and bias.
      dtype: dtype to which features, weights and biases are cast; None for their promoted dtype. The vector
        is not cast.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams "params" and, for dropout, "dropout".

    Raises:
      ValueError: a rate is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = GATv2Conv(4, 8, 2, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4))).shape
      (3, 2, 8)
    """

    uncast = ("attention",)
    in_features: int
    out_features: int
    num_heads: int
    _: dataclasses.KW_ONLY
    feature_dropout: float = 0.0
    attention_dropout: float = 0.0
    negative_slope: float = 0.2
    residual: bool = False
    activation: Activation | None = None
    allow_zero_in_degree: bool = False
    use_bias: bool = True
    share_weights: bool = False

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        rates = {"feature_dropout": self.feature_dropout, "attention_dropout": self.attention_dropout}
        self.dropout_keys = DropoutKeys(rngs, **rates)
        draw, width = Drawing(rngs, self.param_dtype), self.num_heads * self.out_features
        has_weight = self.residual and self.in_features != width

        def dense_params(is_there: bool) -> list[nnx.Param[jax.Array] | None]:
            weight = draw.glorot(self.in_features, width) if is_there else None
            return [nnx.data(weight), nnx.data(draw.zeros(width) if is_there and self.use_bias else None)]

        self.attention = draw.glorot(1, self.num_heads, self.out_features)
        self.left_weight, self.left_bias = dense_params(True)
        self.right_weight, self.right_bias = dense_params(not self.share_weights)
        self.residual_weight, self.residual_bias = dense_params(has_weight)
