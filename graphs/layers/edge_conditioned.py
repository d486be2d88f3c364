"""The layer of message passing neural networks (NNConv): a network computes a matrix for each edge."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.fn import Reduce
from jmp_train.graphs.kernels import MAPPED_SUM, MappedInputs, NetworkMatrices, OfEdges
from jmp_train.graphs.layers.dense import Activation, activated, dense, with_bias
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_features,
    as_edge_weight,
    as_floats,
    as_graph,
    as_optional,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.messages import Edge, Frame, PerEdge, receive
from jmp_train.graphs.structure import Block, Graph, checked_word, graph_storage, inverse_degrees, upcast
from jmp_train.policies import autocast_as

Params = TypeVar("Params")
AGGREGATORS = ("sum", "mean", "max")


def nn_conv(
    graph: AnyEdges,
    features: EndFeatures,
    edge_features: Floats,
    network: Callable[[Params, jax.Array], jax.Array],
    network_params: Params,
    out_features: int,
    self_weight: Floats | None = None,
    bias: Floats | None = None,
    *,
    aggregator: str = "sum",
    edge_weight: Floats | None = None,
    activation: Activation | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Returns the sum, mean or maximum of the neighbors' features times matrices that a network makes of edge features.

    The network runs, forward and backward, on a chunk of edges at a time, so that the matrices of all edges, [edges,
    in, out], are never stored. Under autocast its parameters are half and it computes in float32.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`.
      edge_features: floating [edges, width].
      network: a function of its parameters and of features [some edges, width] to [some edges, in * out]; it treats
        all edges alike, and closes over no traced array.
      network_params: a tree of floating arrays.
      out_features: the width of the result.
      self_weight: floating [in, out], weight of the node itself; None to leave the node out.
      bias: floating [out].
      aggregator: "sum", "mean" or "max"; nodes without edges have 0.
      edge_weight: floating [edges], factors of the messages.
      activation: a function of the result.
      implementation: see `rel_graph_conv`.

    Returns:
      [nodes, out] in the promoted dtype of features, weight and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, `aggregator` is unknown, or the graph does not support the implementation.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph, lengths = from_edges([0, 1], [2, 2], 3), jnp.array([[10.0], [100.0]])
      >>> features = jnp.array([[1.0], [2.0], [3.0]])
      >>> nn_conv(graph, features, lengths, lambda scale, rows: scale * rows, jnp.array(2.0), 1).ravel().tolist()
      [0.0, 0.0, 420.0]

    Reference: Gilmer et al., Neural Message Passing for Quantum Chemistry, https://arxiv.org/abs/1704.01212; DGL's
    and PyTorch Geometric's NNConv.
    """
    checked_word("aggregator", aggregator, AGGREGATORS)
    graph = as_graph(graph, features)
    rows = end_rows(graph, features, "in")
    width = rows.senders.shape[1]
    of_edges = as_edge_features(graph, edge_features)
    params = jax.tree.map(lambda x: as_floats("network_params", x, ...), network_params)
    own = as_optional("self_weight", self_weight, width, out_features)
    offset = as_optional("bias", bias, out_features)
    _check_network(network, params, of_edges, width, out_features)
    rows, (own, offset) = promoted_with(rows, own, offset)
    dtypes = jax.tree.map(lambda x: x.dtype, params)

    def run(of_some: jax.Array, *leaves: jax.Array) -> jax.Array:  # the kernel may pass arrays in float32
        params = jax.tree.unflatten(jax.tree.structure(dtypes), leaves)
        return network(jax.tree.map(lambda x, dtype: x.astype(dtype), params, dtypes), of_some.astype(of_edges.dtype))

    matrices = NetworkMatrices(run, width, out_features)
    of_each = OfEdges(weight=as_edge_weight(graph, edge_weight), features=of_edges)
    inputs = MappedInputs(tuple(jax.tree.leaves(params)), of_each, rows.senders)
    if aggregator == "max":
        result = _largest(graph, matrices, inputs, implementation)
    else:
        scale = inverse_degrees(graph.in_degrees, rows.senders) if aggregator == "mean" else None
        result = MAPPED_SUM(implementation, graph.connections, matrices, inputs, scale)
    result = with_bias(result, offset) if own is None else dense(rows.receivers, own, offset) + result
    return activated(result, activation)


def _check_network(network: Callable[..., Any], params: Any, of_edges: jax.Array, width: int, out: int) -> None:
    found = jax.eval_shape(network, params, jax.ShapeDtypeStruct((2, *of_edges.shape[1:]), of_edges.dtype))
    shape = getattr(found, "shape", None)
    if shape is None or shape[:1] != (2,) or math.prod(shape) != 2 * width * out:
        raise ValueError(
            f"network must return [edges, {width} * {out}] for edge features, got {shape or found} for two edges"
        )


def _largest(
    graph: Graph | Block, matrices: NetworkMatrices, inputs: MappedInputs, implementation: str | None
) -> jax.Array:
    """Returns the largest products of the edges that enter each node, elementwise, in the rows' dtype."""
    stored = jax.tree.map(graph_storage, (inputs.shared, inputs.rows))
    of_edges = {name: x for name, x in inputs.edges._asdict().items() if x is not None}

    @autocast_as("float32")
    def product(shared: Any, row: jax.Array, own: OfEdges) -> jax.Array:
        return matrices(shared, jax.tree.map(lambda x: x[None, None], own), upcast(row)[None, None])[0]

    def message(edge: Edge) -> dict[str, jax.Array]:
        own = OfEdges(**{name: edge.data[name] for name in of_edges})
        return {"m": product(stored[0], edge.src["row"], own)}

    frame = Frame(graph.connections, {"row": stored[1]}, {}, of_edges)
    result = receive(frame, PerEdge(message), Reduce("max", "m", "x"), implementation)["x"]
    return graph_storage(result.astype(inputs.rows.dtype))


class NNConv(DrawnLayer, of=nn_conv):
    """The layer of `nn_conv`: `layer(graph, features, edge_features, edge_weight=None)`.

    The weight of the node itself has a Glorot uniform initializer; the bias is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result.
      network: an nnx module of edge features [edges, width] to [edges, in_features * out_features], whose only
        state is parameters.
      aggregator: see `nn_conv`.
      use_bias: whether there is a bias.
      use_self_weight: whether a node's own features count.
      activation: see `nn_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype. The network has its own.
      param_dtype: the dtype of weight and bias.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `aggregator` is unknown.
      TypeError: the network has state other than parameters.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph, rngs = from_edges([0, 1, 2], [1, 2, 0], 3), nnx.Rngs(0)
      >>> layer = NNConv(4, 8, nnx.Linear(5, 4 * 8, rngs=rngs), rngs=rngs)
      >>> layer(graph, jnp.ones((3, 4)), jnp.ones((3, 5))).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    network: nnx.Module
    _: dataclasses.KW_ONLY
    aggregator: str = "sum"
    use_bias: bool = True
    use_self_weight: bool = True
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("aggregator", self.aggregator, AGGREGATORS)
        _, _, others = nnx.split(self.network, nnx.Param, ...)
        if jax.tree.leaves(others):
            raise TypeError(
                "network must have no state other than parameters, because it runs on a few edges at a time"
            )
        draw = Drawing(rngs, self.param_dtype)
        glorot = nnx.initializers.glorot_uniform()
        self.self_weight = nnx.data(draw(glorot, self.in_features, self.out_features) if self.use_self_weight else None)
        self.bias = nnx.data(draw.zeros(self.out_features) if self.use_bias else None)

    def __call__(
        self,
        graph: AnyEdges,
        features: EndFeatures,
        edge_features: Floats,
        edge_weight: Floats | None = None,
    ) -> jax.Array:
        """Returns the layer's result [nodes, out], for the arguments of `nn_conv`."""
        definition, params = nnx.split(self.network)
        return self.call(
            graph,
            self.cast(features),
            self.cast(edge_features),
            network=lambda params, rows: nnx.merge(definition, params)(rows),
            network_params=params,
            edge_weight=edge_weight,
        )
