"""The layer of relational graph convolutional networks (RGCN): a matrix for each edge type."""

import dataclasses

import jax
import jax.numpy as jnp
import jraph
import numpy as np
from flax import nnx

from jmp_train.graphs.array_types import Floats, Ids
from jmp_train.graphs.kernels import MAPPED_SUM, DiagonalBlocks, MappedInputs, MixedMatrices, OfEdges
from jmp_train.graphs.layers.dense import Activation, activated, check_dropout, dense, drop, with_bias
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer, DropoutKeys, uniform_between
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_types,
    as_edge_weight,
    as_floats,
    as_graph,
    as_optional,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import AnyBatch, checked_word, from_jraph
from jmp_train.policies.pytrees import has_tracers

REGULARIZERS = ("none", "basis", "bdd")


def rel_graph_conv(
    graph: AnyEdges,
    features: EndFeatures,
    edge_types: Ids,
    weight: Floats,
    coefficients: Floats | None = None,
    self_weight: Floats | None = None,
    bias: Floats | None = None,
    *,
    edge_weight: Floats | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    activation: Activation | None = None,
    norm: Activation | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the sum of the neighbors' features times the matrices of their edges' types.

    Neither messages nor matrices are stored per edge: both are computed for a chunk of edges at a time, in
    float32, and again for the gradient. If a type's matrix is a mixture of bases, the features of a few edges are
    mixed first and multiplied together.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`.
      edge_types: int [edges]. Known types are checked; under jit, edges with an unknown type have no message.
      weight: floating [types, in, out], a matrix for each type; with coefficients [bases, in, out]; or, for
        block-diagonal matrices, their blocks [types, blocks, in / blocks, out / blocks].
      coefficients: floating [types, bases]: a type's matrix is the sum of the bases, weighted by its row.
      self_weight: floating [in, out], weight of the node itself; None to leave the node out.
      bias: floating [out].
      edge_weight: floating [edges], factors of the messages, see `relation_norm`.
      dropout_rate: the fraction of the result's entries to drop.
      dropout_key: for dropout; required if the rate is not 0.
      activation: a function of the result.
      norm: a function of the summed messages, such as `nnx.LayerNorm`.
      implementation: see `gat_attention`; "xla" also runs over chunks of edges, in their given order.

    Returns:
      [nodes, out] in the promoted dtype of features, weights and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, a type is out of range, the rate is not in [0, 1), the key is missing, or the
        graph does not support the implementation.
      TypeError: an array is not floating, or types are not integers.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [2, 2], 3)
      >>> matrices = jnp.array([[[10.0]], [[100.0]]])
      >>> rel_graph_conv(graph, jnp.array([[1.0], [2.0], [3.0]]), [0, 1], matrices).ravel().tolist()
      [0.0, 0.0, 210.0]

    Reference: Schlichtkrull et al., Modeling Relational Data with Graph Convolutional Networks,
    https://arxiv.org/abs/1703.06103; DGL's RelGraphConv.
    """
    check_dropout("dropout_rate", dropout_rate, dropout_key)
    graph = as_graph(graph, features)
    kernel, mixing, num_types, (width, out) = _checked_matrices(weight, coefficients)
    rows = end_rows(graph, features, width)
    own = as_optional("self_weight", self_weight, width, out)
    offset = as_optional("bias", bias, out)
    types = as_edge_types(graph, edge_types, num_types)
    edge_weight = as_edge_weight(graph, edge_weight)
    rows, (kernel, mixing, own, offset) = promoted_with(rows, kernel, mixing, own, offset)
    matrices = DiagonalBlocks() if kernel.ndim == 4 else MixedMatrices()
    shared = kernel if kernel.ndim == 4 else (kernel, mixing)
    inputs = MappedInputs(shared, OfEdges(types, edge_weight), rows.senders)
    result = MAPPED_SUM(implementation, graph.connections, matrices, inputs)
    if norm is not None:
        result = activated(result, norm)
    result = with_bias(result, offset) if own is None else dense(rows.receivers, own, offset) + result
    return drop(activated(result, activation), dropout_rate, dropout_key)


def _checked_matrices(
    weight: Floats, coefficients: Floats | None
) -> tuple[jax.Array, jax.Array | None, int, tuple[int, int]]:
    """Returns checked weight and coefficients, with the number of types and the widths before and after."""
    if jnp.ndim(jnp.asarray(weight)) == 4:
        kernel = as_floats("weight", weight, "types", "blocks", "in / blocks", "out / blocks")
        if coefficients is not None:
            raise ValueError("coefficients need a weight [bases, in, out], got diagonal blocks")
        num_types, blocks, into, out = kernel.shape
        return kernel, None, num_types, (blocks * into, blocks * out)
    kernel = as_floats("weight", weight, "types or bases", "in", "out")
    mixing = as_optional("coefficients", coefficients, "types", kernel.shape[0])
    num_types = kernel.shape[0] if mixing is None else mixing.shape[0]
    return kernel, mixing, num_types, (kernel.shape[1], kernel.shape[2])


def relation_norm(graph: AnyBatch, edge_types: Ids) -> jax.Array:
    """Returns for each edge 1 over the number of edges of its type that enter the same node; runs on the host.

    Pass it as `edge_weight` of `rel_graph_conv`, to average the messages of each type as in the paper.

    Args:
      graph: a graph of ours or jraph's that stores single edges.
      edge_types: int [edges].

    Returns:
      Float32 [edges]; 1 for padding edges.

    Raises:
      TypeError: graph or types are traced, or types are not integers.
      ValueError: types have another shape.

    Example:
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2, 0], [2, 2, 2, 1], 3)
      >>> relation_norm(graph, [0, 1, 1, 1]).tolist()
      [1.0, 0.5, 0.5, 1.0]

    Reference: Schlichtkrull et al., https://arxiv.org/abs/1703.06103, equation 2.
    """
    if has_tracers((graph, edge_types)):
        raise TypeError("graph and edge_types are traced: call relation_norm outside of jit")
    graph = from_jraph(graph) if isinstance(graph, jraph.GraphsTuple) else graph
    types = np.asarray(edge_types)
    if not np.issubdtype(types.dtype, np.integer):
        raise TypeError(f"edge_types must be integers, got {types.dtype}")
    if types.shape != (graph.num_edges,):
        raise ValueError(f"edge_types must be [{graph.num_edges}], got shape {types.shape}")
    receivers = np.asarray(graph.receivers)
    pairs = np.stack([receivers, types.astype(np.int64)], 1)
    _, places, counts = np.unique(pairs, axis=0, return_inverse=True, return_counts=True)
    sizes = np.where(receivers < graph.num_nodes, counts[places.ravel()], 1)
    return jnp.asarray(1 / sizes, jnp.float32)


class RelGraphConv(DrawnLayer, of=rel_graph_conv):
    """The layer of `rel_graph_conv`: `layer(graph, features, edge_types, edge_weight=None)`.

    Matrices have a uniform initializer between -1 and 1 over the square root of their input width; coefficients
    and the weight of the node itself have a Glorot uniform one with gain sqrt(2); the bias is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result.
      num_types: number of edge types.
      regularizer: "none" for a matrix of each type; "basis" for mixtures of `num_bases` matrices; "bdd" for
        `num_bases` blocks on the diagonal.
      num_bases: number of bases or blocks; None for the number of types. Not used with "none".
      use_bias: whether there is a bias.
      use_self_weight: whether a node's own features count.
      dropout_rate: see `rel_graph_conv`; `train` and `eval` switch it on and off.
      norm: see `rel_graph_conv`; an nnx module or a function.
      activation: see `rel_graph_conv`.
      dtype: dtype to which features and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams "params" and, for dropout, "dropout".

    Raises:
      ValueError: `regularizer` is unknown, a number is not positive, blocks do not divide both widths, or the
        rate is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = RelGraphConv(4, 8, 5, regularizer="basis", num_bases=2, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4)), [0, 4, 4]).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    num_types: int
    _: dataclasses.KW_ONLY
    regularizer: str = "none"
    num_bases: int | None = None
    use_bias: bool = True
    use_self_weight: bool = True
    dropout_rate: float = 0.0
    norm: Activation | None = None
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("regularizer", self.regularizer, REGULARIZERS)
        width, out, types = self.in_features, self.out_features, self.num_types
        bases = types if self.num_bases is None else self.num_bases
        if types < 1 or bases < 1:
            raise ValueError(f"num_types={types} and num_bases={self.num_bases} must be positive")
        if self.regularizer == "bdd" and (width % bases or out % bases):
            raise ValueError(f"num_bases={bases} blocks must divide in_features={width} and out_features={out}")
        self.dropout_keys = DropoutKeys(rngs, dropout_rate=self.dropout_rate)
        draw = Drawing(rngs, self.param_dtype)
        glorot = nnx.initializers.variance_scaling(2.0, "fan_avg", "uniform")
        of_blocks = (types, bases, width // bases, out // bases)
        shape = {"none": (types, width, out), "basis": (bases, width, out), "bdd": of_blocks}[self.regularizer]
        self.weight = draw(uniform_between(shape[-2] ** -0.5), *shape)
        self.coefficients = nnx.data(draw(glorot, types, bases) if self.regularizer == "basis" else None)
        self.self_weight = nnx.data(draw(glorot, width, out) if self.use_self_weight else None)
        self.bias = nnx.data(draw.zeros(self.out_features) if self.use_bias else None)

    def __call__(
        self,
        graph: AnyEdges,
        features: EndFeatures,
        edge_types: Ids,
        edge_weight: Floats | None = None,
        *,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Returns the layer's result [nodes, out].

        Args:
          graph: see `rel_graph_conv`.
          features: see `rel_graph_conv`.
          edge_types: see `rel_graph_conv`.
          edge_weight: see `rel_graph_conv`.
          deterministic: True to turn dropout off; None for the last choice of `train` or `eval`.
          rngs: random streams for dropout, in place of the layer's own.
        """
        given = {"edge_types": edge_types, "edge_weight": edge_weight}
        return self.call(graph, self.cast(features), **given, **self.dropout_keys(deterministic, rngs))
