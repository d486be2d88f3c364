"""Features after several hops: simplified graph convolution (SGC), and personalized PageRank of predictions (APPNP)."""

import dataclasses

import jax
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.dense import product, with_bias
from jmp_train.graphs.layers.gcn import NORMS
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer, DropoutKeys, Layer
from jmp_train.graphs.layers.layer_inputs import as_floats, as_optional, check_in_degrees, end_rows, promoted
from jmp_train.graphs.layers.propagation import as_whole_graph, is_narrowing, propagate
from jmp_train.graphs.structure import AnyBatch, SparseFeatures, checked_word


def sg_conv(
    graph: AnyBatch | None,
    features: Floats | SparseFeatures,
    weight: Floats,
    bias: Floats | None = None,
    *,
    k: int = 1,
    norm: str = "both",
    edge_weight: Floats | None = None,
    allow_zero_in_degree: bool = False,
) -> jax.Array:
    """Returns features after `k` hops, times weights: logistic regression on smoothed features.

    The hops do not depend on the weights. So `propagate(graph, features, k)` can compute them once, and `sg_conv(None,
    propagated, weight, bias)` trains on its result, without a graph, as `cached=True` does in other libraries.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used; None if features are already propagated.
      features: floating [nodes, in], or `SparseFeatures`.
      weight: floating [in, out]; the product comes first if it reduces the number of features.
      bias: floating [out].
      k: number of hops.
      norm: see `graph_conv`.
      edge_weight: floating [edges], factors of the messages; see `edge_weight_norm` for weighted degrees.
      allow_zero_in_degree: True to allow nodes without incoming edges; they get only the bias.

    Returns:
      [nodes, out] in the promoted dtype of features, weight and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, `k` is negative, `norm` is unknown, some node has no incoming edge, or there
        are edge weights without a graph.
      TypeError: an array is not floating, or the graph is a block.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> ring, weight = from_edges([0, 1, 2], [1, 2, 0], 3), jnp.ones((1, 1))
      >>> features = jnp.arange(3.0)[:, None]
      >>> sg_conv(ring, features, weight, k=2).ravel().tolist()
      [1.0, 2.0, 0.0]
      >>> propagated = propagate(ring, features, 2)
      >>> sg_conv(None, propagated, weight).ravel().tolist()
      [1.0, 2.0, 0.0]

    Reference: Wu et al., Simplifying Graph Convolutional Networks, https://arxiv.org/abs/1902.07153; DGL's SGConv.
    """
    kernel = as_floats("weight", weight, "in", "out")
    width, out = kernel.shape
    offset = as_optional("bias", bias, out)
    if graph is None:
        if edge_weight is not None:
            raise ValueError("edge_weight needs a graph: features that are already propagated are already weighted")
        rows, kernel, offset = promoted(as_floats("features", features, "nodes", width), kernel, offset)
        result = product(rows, kernel)
    else:
        whole = as_whole_graph(graph, features)
        check_in_degrees(whole, allow_zero_in_degree)
        rows = end_rows(whole, features, width, can_be_sparse=True).senders
        rows, kernel, offset = promoted(rows, kernel, offset)
        if is_narrowing(rows, kernel):
            result = propagate(whole, product(rows, kernel), k, norm=norm, edge_weight=edge_weight)
        else:
            result = product(propagate(whole, rows, k, norm=norm, edge_weight=edge_weight), kernel)
    return with_bias(result, offset)


class SGConv(DrawnLayer, of=sg_conv):
    """The layer of `sg_conv`: `layer(graph, features, edge_weight=None)`, or `layer(None, propagated)`.

    The weight [in, out] has a Glorot uniform initializer; the bias [out] is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result.
      k: see `sg_conv`.
      norm: see `graph_conv`.
      use_bias: whether there is a bias.
      allow_zero_in_degree: see `sg_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `norm` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph, features = from_edges([0, 1, 2], [1, 2, 0], 3), jnp.ones((3, 4))
      >>> layer = SGConv(4, 8, k=2, rngs=nnx.Rngs(0))
      >>> propagated = layer.propagate(graph, features)  # once; then each step takes
      >>> bool(jnp.allclose(layer(None, propagated), layer(graph, features)))
      True
    """

    in_features: int
    out_features: int
    k: int = 1
    _: dataclasses.KW_ONLY
    norm: str = "both"
    use_bias: bool = True
    allow_zero_in_degree: bool = False

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("norm", self.norm, NORMS)
        draw = Drawing(rngs, self.param_dtype)
        self.weight = draw(nnx.initializers.glorot_uniform(), self.in_features, self.out_features)
        self.bias = nnx.data(draw.zeros(self.out_features) if self.use_bias else None)

    def propagate(self, graph: AnyBatch, features: Floats, edge_weight: Floats | None = None) -> jax.Array:
        """Returns the features after all hops [nodes, in], to pass to the layer with `graph=None`.

        Args:
          graph: see `sg_conv`.
          features: floating [nodes, in].
          edge_weight: see `sg_conv`.
        """
        whole = as_whole_graph(graph, features)
        check_in_degrees(whole, self.allow_zero_in_degree)
        return propagate(whole, self.cast(features), self.k, norm=self.norm, edge_weight=edge_weight)

    def __call__(
        self,
        graph: AnyBatch | None,
        features: Floats | SparseFeatures,
        edge_weight: Floats | None = None,
    ) -> jax.Array:
        """Returns the convolution [nodes, out], for the arguments of `sg_conv`."""
        return self.call(graph, self.cast(features), edge_weight=edge_weight)


def appnp_conv(
    graph: AnyBatch,
    features: Floats,
    k: int = 10,
    alpha: float = 0.1,
    *,
    norm: str = "both",
    edge_weight: Floats | None = None,
    edge_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns features after `k` hops of `(1 - alpha) * neighbors + alpha * features`; see `propagate`.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used; best with self-loops.
      features: floating [nodes, ...], such as the predictions of a network for each node separately.
      k: number of hops.
      alpha: the fraction of the first features in each hop, in [0, 1]; the restart probability of a random walk.
      norm: see `graph_conv`.
      edge_weight: see `propagate`.
      edge_dropout: see `propagate`.
      dropout_key: see `propagate`.

    Returns:
      [nodes, ...] in the features' dtype; half under autocast.

    Raises:
      ValueError: see `propagate`.
      TypeError: see `propagate`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> pair = from_edges([0, 1], [1, 0], 2)
      >>> appnp_conv(pair, jnp.array([0.0, 1.0]), k=1, alpha=0.25).tolist()
      [0.75, 0.25]

    Reference: Klicpera et al., Predict then Propagate: Graph Neural Networks meet Personalized PageRank,
    https://arxiv.org/abs/1810.05997; DGL's APPNPConv.
    """
    return propagate(
        graph,
        features,
        k,
        alpha=alpha,
        norm=norm,
        edge_weight=edge_weight,
        edge_dropout=edge_dropout,
        dropout_key=dropout_key,
    )


class APPNPConv(Layer, of=appnp_conv):
    """The layer of `appnp_conv`: `layer(graph, features, edge_weight=None)`. It has no parameters.

    Args:
      k: see `appnp_conv`.
      alpha: see `appnp_conv`.
      edge_dropout: see `propagate`; `train` and `eval` switch it on and off.
      norm: see `graph_conv`.
      dtype: dtype to which features are cast; None for their own.
      rngs: flax's random streams; "dropout" is used, and required if the rate is not 0.

    Raises:
      ValueError: the rate is not in [0, 1), has no streams, or `norm` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> APPNPConv(k=3, alpha=0.2)(graph, jnp.ones((3, 4), jnp.float16)).dtype.name
      'float16'
    """

    def __init__(
        self,
        k: int = 10,
        alpha: float = 0.1,
        *,
        edge_dropout: float = 0.0,
        norm: str = "both",
        dtype: DTypeLike | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> None:
        checked_word("norm", norm, NORMS)
        self.k = k
        self.alpha = alpha
        self.norm = norm
        self.dtype = dtype
        self.edge_dropout = edge_dropout
        self.dropout_keys = DropoutKeys(rngs, edge_dropout=edge_dropout)

    def __call__(
        self,
        graph: AnyBatch,
        features: Floats,
        edge_weight: Floats | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns the features after all hops, [nodes, ...].

        Args:
          graph: see `appnp_conv`.
          features: see `appnp_conv`.
          edge_weight: see `propagate`.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        dropout = self.dropout_keys(deterministic, rngs)
        return self.call(graph, self.cast(features), edge_weight=edge_weight, **dropout)
