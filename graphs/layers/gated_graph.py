"""The layer of gated graph sequence networks: several rounds of messages, read by a gated recurrent unit (GRU)."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats, Ids
from jmp_train.graphs.kernels import MAPPED_SUM, MappedInputs, MixedMatrices, OfEdges
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.layers.dense import dense
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer
from jmp_train.graphs.layers.layer_inputs import (
    as_edge_types,
    as_edge_weight,
    as_floats,
    as_graph,
    as_optional,
    promoted,
)
from jmp_train.graphs.structure import AnyBatch, Block, Graph, graph_storage, upcast
from jmp_train.policies import autocast_as


def gated_graph_conv(
    graph: AnyBatch,
    features: Floats,
    weight: Floats,
    gru_weights: Sequence[Floats],
    message_bias: Floats | None = None,
    edge_types: Ids | None = None,
    *,
    num_steps: int,
    edge_weight: Floats | None = None,
) -> jax.Array:
    """Returns the states of nodes after several rounds. In each, a GRU reads the sum of the messages.

    A message is the sender's state times the matrix of the edge's type. States are float32 from round to round, because
    slow changes of a state stagnate in half precision. Messages are stored in the features' dtype.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used.
      features: floating [nodes, in], the first states, padded with zeros; `in` is at most `width`.
      weight: floating [types, width, width]; or [steps, types, width, width], different in each round.
      gru_weights: the weights of input and of hidden state, [width, 3 width] each, and their biases [3 width], with
        gates in torch's order: reset, update, new.
      message_bias: floating [types, width], added to the messages of a type.
      edge_types: int [edges], see `rel_graph_conv`; None if there is one type.
      num_steps: number of rounds.
      edge_weight: floating [edges], factors of the messages.

    Returns:
      [nodes, width] in the promoted dtype of features and weights; half under autocast.

    Raises:
      ValueError: a shape does not fit, a type is out of range or types are missing, or `num_steps` is not positive.
      TypeError: an array is not floating, types are not integers, or the graph is a block, whose sources get no
        messages and cannot send again.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [1, 0], 2)
      >>> zeros = jnp.zeros((1, 3)), jnp.zeros((1, 3)), jnp.zeros(3), jnp.zeros(3)
      >>> gated_graph_conv(graph, jnp.array([[4.0], [8.0]]), jnp.ones((1, 1, 1)), zeros, num_steps=2).tolist()
      [[1.0], [2.0]]

    Reference: Li et al., Gated Graph Sequence Neural Networks, https://arxiv.org/abs/1511.05493; DGL's
    GatedGraphConv, and PyTorch Geometric's with different weights in each round.
    """
    ours = as_graph(graph, features)
    if isinstance(ours, Block):
        raise TypeError("gated_graph_conv needs a Graph: the sources of a Block receive no messages for the next step")
    if num_steps < 1:
        raise ValueError(f"num_steps={num_steps} must be positive")
    kernel = _as_matrices(weight, num_steps)
    num_types, width = kernel.shape[1:3]
    rows = as_floats("features", features, ours.num_nodes, "in")
    if rows.shape[1] > width:
        raise ValueError(f"features of width {rows.shape[1]} must be at most as wide as the states, {width}")
    offset = as_optional("message_bias", message_bias, num_types, width)
    cell = _as_gru(gru_weights, width)
    if edge_types is None and num_types > 1:
        raise ValueError(f"weight has {num_types} types: edge_types are needed")
    types = None if edge_types is None else as_edge_types(ours, edge_types, num_types)
    edge_weight = as_edge_weight(ours, edge_weight)
    rows, kernel, offset, *cell = promoted(rows, kernel, offset, *cell)

    stored = jnp.pad(rows, ((0, 0), (0, width - rows.shape[1])))
    state = autocast_as("float32")(upcast)(stored)
    for step in range(num_steps):
        matrices = kernel[min(step, len(kernel) - 1)]
        if types is None:
            sent = dense(stored, matrices[0], None if offset is None else offset[0])
            messages = aggregate(ours.connections, sent, edge_weight)
        else:
            messages = _typed_messages(ours, stored, matrices, offset, OfEdges(types, edge_weight))
        state = _gru_state(state, messages, cell)
        stored = graph_storage(state.astype(rows.dtype))
    return stored


def _as_matrices(weight: Floats, num_steps: int) -> jax.Array:
    """Returns checked weights [steps or 1, types, width, width]."""
    kernel = jnp.asarray(weight)
    if kernel.ndim == 4:
        return as_floats("weight", kernel, num_steps, "types", "width", kernel.shape[2])
    kernel = as_floats("weight", kernel, "types", "width", kernel.shape[1] if kernel.ndim > 1 else "width")
    return kernel[None]


def _as_gru(weights: Sequence[Floats], width: int) -> list[jax.Array]:
    shapes = _gru_shapes(width)
    if len(weights) != len(shapes):
        raise ValueError(f"gru_weights must be {len(shapes)} arrays, got {len(weights)}")
    pairs = enumerate(zip(weights, shapes, strict=True))
    return [as_floats(f"gru_weights[{i}]", array, *shape) for i, (array, shape) in pairs]


def _typed_messages(
    graph: Graph, rows: jax.Array, matrices: jax.Array, offset: jax.Array | None, of_edges: OfEdges
) -> jax.Array:
    """Returns the sums [nodes, width] of messages; the bias is a row of the matrices, for a feature of 1."""
    if offset is not None:
        rows = jnp.concatenate([rows, jnp.ones_like(rows[:, :1])], 1)
        matrices = jnp.concatenate([matrices, offset[:, None]], 1)
    return MAPPED_SUM(None, graph.connections, MixedMatrices(), MappedInputs((matrices, None), of_edges, rows))


def _gru_shapes(width: int) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of a GRU's weights, for input and hidden state, and of their biases."""
    return ((width, 3 * width), (width, 3 * width), (3 * width,), (3 * width,))


@autocast_as("tf32")
@jax.checkpoint
def _gru_state(hidden: jax.Array, inputs: jax.Array, weights: Sequence[jax.Array]) -> jax.Array:
    """Returns the next hidden state [nodes, width], in float32 or higher precision; the gradient recomputes the gates.

    Args:
      hidden: the state, in float32 or higher precision, [nodes, width].
      inputs: floating [nodes, width].
      weights: floating, of the shapes of `_gru_shapes`.

    Reference: Cho et al., https://arxiv.org/abs/1406.1078, in the form of torch.nn.GRUCell.
    """
    of_input, of_hidden, input_bias, hidden_bias = (upcast(weight) for weight in weights)
    reset, update, new = jnp.split(upcast(inputs) @ of_input + input_bias, 3, axis=-1)
    own_reset, own_update, own_new = jnp.split(hidden @ of_hidden + hidden_bias, 3, axis=-1)
    update = jax.nn.sigmoid(update + own_update)
    new = jnp.tanh(new + jax.nn.sigmoid(reset + own_reset) * own_new)
    return (1 - update) * new + update * hidden


class GatedGraphConv(DrawnLayer, of=gated_graph_conv):
    """The layer of `gated_graph_conv`: `layer(graph, features, edge_types=None, edge_weight=None)`.

    Matrices have a Glorot uniform initializer with gain sqrt(2), the GRU's weights and biases a uniform one between -1
    and 1 over the square root of the width; the messages' bias is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of states and result, at least as large.
      num_steps: number of rounds.
      num_types: number of edge types.
      use_bias: whether messages have a bias.
      dtype: dtype to which features and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `num_steps` or `num_types` is not positive, or features are wider than the result.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = GatedGraphConv(4, 8, 3, num_types=2, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4)), [0, 1, 1]).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    num_steps: int
    _: dataclasses.KW_ONLY
    num_types: int = 1
    use_bias: bool = True

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        types, out = self.num_types, self.out_features
        if self.num_steps < 1 or types < 1:
            raise ValueError(f"num_steps={self.num_steps} and num_types={types} must be positive")
        if self.in_features > out:
            raise ValueError(f"in_features={self.in_features} must be at most out_features={out}")
        draw = Drawing(rngs, self.param_dtype)
        glorot = nnx.initializers.variance_scaling(2.0, "fan_avg", "uniform", batch_axis=0)
        self.weight = draw(glorot, types, out, out)
        self.message_bias = nnx.data(draw.zeros(types, out) if self.use_bias else None)
        self.gru_weights = nnx.List([draw.linear(out, *shape) for shape in _gru_shapes(out)])

    def __call__(
        self,
        graph: AnyBatch,
        features: Floats,
        edge_types: Ids | None = None,
        edge_weight: Floats | None = None,
    ) -> jax.Array:
        """Returns the nodes' states [nodes, out], for the arguments of `gated_graph_conv`."""
        given = {"edge_types": edge_types, "edge_weight": edge_weight}
        return self.call(graph, self.cast(features), **given)
