"""Graph attention with dynamic logits (GATv2): the ranking of neighbors depends on the node."""

import jax
import jax.numpy as jnp
import jraph
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.attention import gatv2_attention
from jmp_train.graphs.layers.dense import Activation, activated, check_dropout, dense, split_key
from jmp_train.graphs.layers.layer import DropoutKeys, Layer, glorot_param
from jmp_train.graphs.layers.layer_inputs import (
    EndFeatures,
    as_floats,
    as_graph,
    as_optional,
    check_in_degrees,
    checked_residual,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import Block, Graph


def gatv2_conv(
    graph: Graph | Block | jraph.GraphsTuple,
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


class GATv2Conv(Layer):
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

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_heads: int,
        *,
        feature_dropout: float = 0.0,
        attention_dropout: float = 0.0,
        negative_slope: float = 0.2,
        residual: bool = False,
        activation: Activation | None = None,
        allow_zero_in_degree: bool = False,
        use_bias: bool = True,
        share_weights: bool = False,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        rngs: nnx.Rngs,
    ) -> None:
        self.negative_slope = negative_slope
        self.residual = residual
        self.activation = activation
        self.allow_zero_in_degree = allow_zero_in_degree
        self.dtype = dtype
        self.dropout_keys = DropoutKeys(rngs, feature_dropout=feature_dropout, attention_dropout=attention_dropout)
        width = num_heads * out_features

        def dense_params(is_there: bool) -> list[nnx.Param[jax.Array] | None]:
            weight = glorot_param(rngs, (in_features, width), param_dtype) if is_there else None
            bias = nnx.Param(jnp.zeros(width, param_dtype)) if is_there and use_bias else None
            return [nnx.data(weight), nnx.data(bias)]

        self.attention = glorot_param(rngs, (1, num_heads, out_features), param_dtype)
        self.left_weight, self.left_bias = dense_params(True)
        self.right_weight, self.right_bias = dense_params(not share_weights)
        self.residual_weight, self.residual_bias = dense_params(residual and in_features != width)

    def __call__(
        self,
        graph: Graph | Block | jraph.GraphsTuple,
        features: EndFeatures,
        edge_weight: Floats | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns the attention [nodes, heads, out].

        Args:
          graph: see `gatv2_conv`.
          features: see `gatv2_conv`.
          edge_weight: see `gatv2_conv`.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        given = {"attention": self.attention, "edge_weight": edge_weight}  # never cast
        return self.call(gatv2_conv, graph, self.cast(features), **given, **self.dropout_keys(deterministic, rngs))
