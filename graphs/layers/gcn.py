"""Graph convolution: the sum of neighbors' features, scaled by the degrees."""

import dataclasses

import jax
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.aggregation import aggregate, degree_scale
from jmp_train.graphs.layers.dense import Activation, activated, product, with_bias
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_weight,
    as_graph,
    as_optional,
    check_in_degrees,
    end_rows,
    promoted,
)
from jmp_train.graphs.structure import Adjacency, Block, Graph, SparseFeatures, checked_word, inverse_degrees, rows_like

# The powers of the degrees of senders and receivers by which features are scaled.
NORMS = {"none": (0, 0), "both": (-0.5, -0.5), "left": (-1, 0), "right": (0, -1)}


def graph_conv(
    graph: AnyEdges,
    features: EndFeatures,
    weight: Floats | None = None,
    bias: Floats | None = None,
    *,
    norm: str = "both",
    edge_weight: Floats | None = None,
    activation: Activation | None = None,
    allow_zero_in_degree: bool = False,
) -> jax.Array:
    """Returns the sum of the neighbors' features, scaled by degrees, times weights.

    Features are scaled in float32 within the sum, so that nothing overflows in half precision. The product comes
    first if it reduces the number of features. The sums of a sampled block are unbiased estimates of those of the whole
    graph: degrees are the whole graph's, and the sampled edges are scaled up.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`; or,
        with a weight, `SparseFeatures`, also for a block.
      weight: floating [in, out]; None for no product.
      bias: floating [out], added to all nodes.
      norm: "both" divides by the square root of the sender's out-degree times the receiver's in-degree,
        "left" by the sender's out-degree, "right" by the receiver's in-degree; "none" does not divide.
      edge_weight: floating [edges], factors of the messages; see `edge_weight_norm` for weighted degrees.
      activation: an elementwise function of the result.
      allow_zero_in_degree: True to allow nodes without incoming edges; they get only the bias.

    Returns:
      [nodes, out] in the promoted dtype of features, weight and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, `norm` is unknown, or some node has no incoming edge.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0] * 10, [1] * 10, 2)
      >>> features = jnp.full((2, 1), 1e4, jnp.float16)
      >>> graph_conv(graph, features, norm="right", allow_zero_in_degree=True).tolist()
      [[0.0], [10000.0]]

    Reference: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks,
    https://arxiv.org/abs/1609.02907; DGL's GraphConv.
    """
    checked_word("norm", norm, NORMS)
    graph = as_graph(graph, features)
    check_in_degrees(graph, allow_zero_in_degree)
    kernel = as_optional("weight", weight, "in", "out")
    width = "in" if kernel is None else kernel.shape[0]
    rows = end_rows(graph, features, width, can_be_sparse=kernel is not None)
    out = rows.given.shape[1] if kernel is None else kernel.shape[1]
    offset = as_optional("bias", bias, out)
    given, kernel, offset = promoted(rows.given, kernel, offset)
    kernel_after = kernel
    if kernel is not None and (isinstance(given, SparseFeatures) or kernel.shape[0] > kernel.shape[1]):
        given, kernel_after = product(given, kernel), None
    sent = dataclasses.replace(rows, given=given).senders
    sender_scale, receiver_scale = degree_scales(graph, norm, sent)

    def after(adjacency: Adjacency, rows: jax.Array, total: jax.Array) -> jax.Array:
        del adjacency, rows
        if receiver_scale is None:
            return total
        return total * rows_like(receiver_scale.astype(total.dtype), total)

    result = aggregate(
        graph.connections,
        sent,
        as_edge_weight(graph, edge_weight),
        sender_scale=sender_scale,
        after=after,
    )
    if kernel_after is not None:
        result = product(result, kernel_after)
    return activated(with_bias(result, offset), activation)


def degree_scales(graph: Graph | Block, norm: str, features: jax.Array) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns the factors of features before and after the sum, float32 [nodes]; None for 1."""
    of_senders, of_receivers = NORMS[norm]
    if not isinstance(graph, Block) or graph.whole_degrees is None:
        sender_scale = degree_scale(graph.out_degrees, of_senders, features)
        return sender_scale, degree_scale(graph.in_degrees, of_receivers, features)
    out_degrees, in_degrees = graph.whole_degrees
    # Scaled up, because the sampled edges stand for all edges.
    of_drawn = inverse_degrees(graph.in_degrees, features) / inverse_degrees(in_degrees, features)
    of_whole = degree_scale(in_degrees, of_receivers, features)
    receiver_scale = of_drawn if of_whole is None else of_drawn * of_whole
    return degree_scale(out_degrees, of_senders, features), receiver_scale


class GraphConv(DrawnLayer, of=graph_conv):
    """The layer of `graph_conv`: `layer(graph, features, edge_weight=None)`.

    The weight [in, out] has a Glorot uniform initializer; the bias [out] is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result; without a weight, that of the features.
      norm: see `graph_conv`.
      use_weight: whether there is a product with a weight.
      use_bias: whether there is a bias.
      activation: see `graph_conv`.
      allow_zero_in_degree: see `graph_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `norm` is unknown, or there is no weight and the widths differ.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = GraphConv(4, 8, dtype=jnp.float16, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4))).dtype.name, layer.weight.dtype.name
      ('float16', 'float32')
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    norm: str = "both"
    use_weight: bool = True
    use_bias: bool = True
    activation: Activation | None = None
    allow_zero_in_degree: bool = False

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("norm", self.norm, NORMS)
        if not self.use_weight and self.in_features != self.out_features:
            raise ValueError(
                f"use_weight=False keeps the width: in_features={self.in_features} and "
                f"out_features={self.out_features} must be equal"
            )
        draw = Drawing(rngs, self.param_dtype)
        glorot = nnx.initializers.glorot_uniform()
        self.weight = nnx.data(draw(glorot, self.in_features, self.out_features) if self.use_weight else None)
        self.bias = nnx.data(draw.zeros(self.out_features) if self.use_bias else None)

    def __call__(self, graph: AnyEdges, features: EndFeatures, edge_weight: Floats | None = None) -> jax.Array:
        """Returns the convolution [nodes, out], for the arguments of `graph_conv`."""
        return self.call(graph, self.cast(features), edge_weight=edge_weight)
