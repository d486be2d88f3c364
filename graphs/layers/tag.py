"""Topology-adaptive graph convolution (TAG): a weight for the features after each number of hops."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.dense import Activation
from jmp_train.graphs.layers.gcn import NORMS
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer
from jmp_train.graphs.layers.propagation import Hop, as_whole_graph, sum_of_terms
from jmp_train.graphs.structure import AnyBatch, SparseFeatures, checked_word, graph_storage, upcast


def tag_conv(
    graph: AnyBatch,
    features: Floats | SparseFeatures,
    weight: Floats,
    bias: Floats | None = None,
    *,
    norm: str = "both",
    edge_weight: Floats | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Returns the sum over i of the features after i hops, times `weight[i]`.

    If a weight reduces the number of features, the products come first, and the hops run on sums as wide as
    the result; otherwise the features of all hops are multiplied at once.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used.
      features: floating [nodes, in], or `SparseFeatures`.
      weight: floating [hops + 1, in, out]; the first is for the features themselves.
      bias: floating [out].
      norm: see `graph_conv`.
      edge_weight: floating [edges], factors of the messages; see `edge_weight_norm` for weighted degrees.
      activation: a function of the result.

    Returns:
      [nodes, out] in the promoted dtype of features, weight and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, or `norm` is unknown.
      TypeError: an array is not floating, or the graph is a block.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> ring = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> weight = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
      >>> tag_conv(ring, jnp.arange(3.0)[:, None], weight).ravel().tolist()
      [120.0, 201.0, 12.0]

    Reference: Du et al., Topology Adaptive Graph Convolutional Networks, https://arxiv.org/abs/1710.10370; DGL's
    TAGConv.
    """
    whole = as_whole_graph(graph, features)
    given = (whole, features, weight, bias, "hops + 1", _sum_of_hops, _hops)
    return sum_of_terms(*given, norm=norm, edge_weight=edge_weight, activation=activation)


def _sum_of_hops(hop: Hop, terms: jax.Array) -> jax.Array:
    """Returns the sum over i of `terms[i]` after i hops, by Horner's rule; terms [count, nodes, out]."""

    def step(total: jax.Array, term: jax.Array) -> tuple[jax.Array, None]:
        return hop(total, lambda neighbors: neighbors + upcast(term)), None

    return jax.lax.scan(step, terms[-1], terms[:-1], reverse=True)[0]


def _hops(hop: Hop, rows: jax.Array, count: int) -> jax.Array:
    """Returns the rows after 0, 1, ... hops, [count, nodes, width]."""

    def step(rows: jax.Array, _: None) -> tuple[jax.Array, jax.Array]:
        rows = hop(rows)
        return rows, rows

    rows = graph_storage(rows)
    _, further = jax.lax.scan(step, rows, length=count - 1)
    return jnp.concatenate([rows[None], further])


class TAGConv(DrawnLayer, of=tag_conv):
    """The layer of `tag_conv`: `layer(graph, features, edge_weight=None)`.

    The weight [k + 1, in, out] has a Glorot normal initializer with gain sqrt(2) over the inputs of all hops; the
    bias [out] is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result.
      k: number of hops.
      norm: see `graph_conv`.
      use_bias: whether there is a bias.
      activation: see `tag_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `norm` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = TAGConv(4, 8, k=3, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4))).shape, layer.weight.shape
      ((3, 8), (4, 4, 8))
    """

    in_features: int
    out_features: int
    k: int = 2
    _: dataclasses.KW_ONLY
    norm: str = "both"
    use_bias: bool = True
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("norm", self.norm, NORMS)
        draw = Drawing(rngs, self.param_dtype)
        init = nnx.initializers.normal((4 / ((self.k + 1) * self.in_features + self.out_features)) ** 0.5)
        self.weight = draw(init, self.k + 1, self.in_features, self.out_features)
        self.bias = nnx.data(draw.zeros(self.out_features) if self.use_bias else None)

    def __call__(
        self, graph: AnyBatch, features: Floats | SparseFeatures, edge_weight: Floats | None = None
    ) -> jax.Array:
        """Returns the convolution [nodes, out], for the arguments of `tag_conv`."""
        return self.call(graph, self.cast(features), edge_weight=edge_weight)
