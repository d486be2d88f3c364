"""Polynomials of a graph's matrix: Chebyshev convolution, of the Laplacian, and topology-adaptive convolution (TAG)."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.dense import Activation
from jmp_train.graphs.layers.gcn import NORMS
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer, uniform_between
from jmp_train.graphs.layers.layer_inputs import as_floats
from jmp_train.graphs.layers.propagation import Hop, as_whole_graph, sum_of_terms
from jmp_train.graphs.structure import AnyBatch, SparseFeatures, checked_word, graph_storage, rows_like, upcast

_Pair = tuple[jax.Array, jax.Array]


def cheb_conv(
    graph: AnyBatch,
    features: Floats | SparseFeatures,
    weight: Floats,
    bias: Floats | None = None,
    *,
    lambda_max: Floats = 2.0,
    norm: str = "both",
    edge_weight: Floats | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Returns the sum over i of the i-th Chebyshev polynomial of the Laplacian, times features, times `weight[i]`.

    With the scaled Laplacian `L = 2 (I - D^-1/2 A D^-1/2) / lambda_max - I`, terms are `T_0 = x`, `T_1 = L x` and
    `T_i = 2 L T_(i-1) - T_(i-2)`. If a weight reduces the number of features, the products come first, and Clenshaw's
    algorithm computes the sum; otherwise all terms are multiplied at once.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used; symmetric, and best without self-loops.
      features: floating [nodes, in], or `SparseFeatures`.
      weight: floating [terms, in, out].
      bias: floating [out].
      lambda_max: the largest eigenvalue of the Laplacian, a number, or [nodes] if the graphs of a batch have their own;
        it is at most 2.
      norm: see `graph_conv`.
      edge_weight: floating [edges], factors of the messages; degrees are numbers of edges. For weighted degrees, pass
        the result of `edge_weight_norm`, with `norm="none"`.
      activation: a function of the result.

    Returns:
      [nodes, out] in the promoted dtype of features, weight and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, or `norm` is unknown.
      TypeError: an array is not floating, or the graph is a block.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> pair = from_edges([0, 1], [1, 0], 2)
      >>> weight = jnp.array([1.0, 10.0, 100.0]).reshape(3, 1, 1)
      >>> cheb_conv(pair, jnp.array([[1.0], [2.0]]), weight).ravel().tolist()
      [81.0, 192.0]

    Reference: Defferrard et al., Convolutional Neural Networks on Graphs with Fast Localized Spectral Filtering,
    https://arxiv.org/abs/1606.09375; DGL's ChebConv. Clenshaw, A note on the summation of Chebyshev series, 1955.
    """
    whole = as_whole_graph(graph, features)
    ratio = 2 / _checked_lambda(lambda_max, whole.num_nodes)

    def add(hop: Hop, terms: jax.Array) -> jax.Array:
        return _series(_Laplacian(hop, ratio), terms)

    def make(hop: Hop, rows: jax.Array, count: int) -> jax.Array:
        return _polynomials(_Laplacian(hop, ratio), rows, count)

    given = (whole, features, weight, bias, "terms", add, make)
    return sum_of_terms(*given, norm=norm, edge_weight=edge_weight, activation=activation)


def _checked_lambda(lambda_max: Floats, nodes: int) -> jax.Array:
    """Returns the largest eigenvalue, in float32 or higher precision, [] or [nodes]."""
    array = upcast(jnp.asarray(lambda_max, None if hasattr(lambda_max, "dtype") else float))
    return as_floats("lambda_max", array, *([nodes] if array.ndim else []))


class _Laplacian(NamedTuple):
    """The Laplacian, scaled so that its eigenvalues are from -1 to 1.

    Attributes:
      hop: the product with the normalized adjacency.
      ratio: 2 over the largest eigenvalue, in float32 or higher precision, [] or [nodes].
    """

    hop: Hop
    ratio: jax.Array

    def next_term(
        self, last: jax.Array, before: jax.Array, factor: jax.Array, term: jax.Array | None = None
    ) -> jax.Array:
        """Returns a factor times the Laplacian of the last rows, minus the rows before, plus a term; rounded once."""

        def combine(neighbors: jax.Array) -> jax.Array:
            ratio = self.ratio.astype(neighbors.dtype)
            ratio = rows_like(ratio, neighbors) if ratio.ndim else ratio
            product = (ratio - 1) * upcast(last) - ratio * neighbors
            result = factor.astype(neighbors.dtype) * product - upcast(before)
            return result if term is None else result + upcast(term)

        return self.hop(last, combine)


def _factors(count: int) -> jax.Array:
    """Returns 1 for the first term after the features themselves, and 2 for the others."""
    return jnp.where(jnp.arange(count - 1) == 0, 1.0, 2.0)


def _series(laplacian: _Laplacian, terms: jax.Array) -> jax.Array:
    """Returns the sum over i of the i-th polynomial times `terms[i]`, [nodes, out]; terms [count, nodes, out]."""

    def step(carry: _Pair, inputs: _Pair) -> tuple[_Pair, None]:
        (last, before), (term, factor) = carry, inputs
        return (laplacian.next_term(last, before, factor, term), last), None

    start = terms[-1], jnp.zeros_like(terms[-1])
    return jax.lax.scan(step, start, (terms[:-1], _factors(len(terms))), reverse=True)[0][0]


def _polynomials(laplacian: _Laplacian, rows: jax.Array, count: int) -> jax.Array:
    """Returns the polynomials times rows, [count, nodes, in]."""

    def step(carry: _Pair, factor: jax.Array) -> tuple[_Pair, jax.Array]:
        last, before = carry
        term = laplacian.next_term(last, before, factor)
        return (term, last), term

    rows = graph_storage(rows)
    _, further = jax.lax.scan(step, (rows, jnp.zeros_like(rows)), _factors(count))
    return jnp.concatenate([rows[None], further])


class ChebConv(DrawnLayer, of=cheb_conv):
    """The layer of `cheb_conv`: `layer(graph, features, edge_weight=None)`.

    The weight [k, in, out] has a Glorot uniform initializer over the inputs of all terms; the bias [out] is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result.
      k: number of terms, including the features themselves.
      lambda_max: see `cheb_conv`; a call may override it.
      norm: see `graph_conv`.
      use_bias: whether there is a bias.
      activation: see `cheb_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `norm` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 1, 2], [1, 0, 2, 1], 3)
      >>> layer = ChebConv(4, 8, k=3, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4))).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    k: int
    _: dataclasses.KW_ONLY
    lambda_max: float = 2.0
    norm: str = "both"
    use_bias: bool = True
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("norm", self.norm, NORMS)
        draw = Drawing(rngs, self.param_dtype)
        uniform = uniform_between((6 / (self.k * self.in_features + self.out_features)) ** 0.5)
        self.weight = draw(uniform, self.k, self.in_features, self.out_features)
        self.bias = nnx.data(draw.zeros(self.out_features) if self.use_bias else None)

    def __call__(
        self,
        graph: AnyBatch,
        features: Floats | SparseFeatures,
        edge_weight: Floats | None = None,
        *,
        lambda_max: Floats | None = None,
    ) -> jax.Array:
        """Returns the convolution [nodes, out].

        Args:
          graph: see `cheb_conv`.
          features: see `cheb_conv`.
          edge_weight: see `cheb_conv`.
          lambda_max: see `cheb_conv`; None for the layer's.
        """
        lambda_max = self.lambda_max if lambda_max is None else lambda_max
        return self.call(graph, self.cast(features), edge_weight=edge_weight, lambda_max=lambda_max)


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
