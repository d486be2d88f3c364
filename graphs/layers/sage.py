"""GraphSAGE: each node's features combined with an aggregate of its neighbors'."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.layers.dense import Activation, activated, check_dropout, dense, product, with_bias
from jmp_train.graphs.layers.layer import Drawing, DropoutConvolution, DropoutKeys, uniform_between
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    EndRows,
    as_edge_weight,
    as_floats,
    as_graph,
    as_optional,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.messages import EdgeBatch, NodeBatch, update_all
from jmp_train.graphs.structure import (
    Adjacency,
    Block,
    Graph,
    SparseFeatures,
    checked_word,
    graph_storage,
    lstm_cell,
    rows_like,
    upcast,
)
from jmp_train.policies import autocast_as

AGGREGATORS = ("mean", "gcn", "pool", "lstm")


def sage_conv(
    graph: AnyEdges,
    features: EndFeatures,
    weight: Floats,
    self_weight: Floats | None = None,
    bias: Floats | None = None,
    *,
    aggregator: str = "mean",
    aggregator_weights: Sequence[Floats] = (),
    edge_weight: Floats | None = None,
    feature_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    activation: Activation | None = None,
    norm: Activation | None = None,
) -> jax.Array:
    """Returns weights times an aggregate of the neighbors, plus weights times the node itself.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or, except with "lstm", a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`; or,
        with the aggregators "mean" and "gcn", `SparseFeatures`, also for a block.
      weight: floating [in, out], weight of the aggregate.
      self_weight: floating [in, out], weight of the node itself; None with "gcn".
      bias: floating [out].
      aggregator: "mean" of the neighbors; "gcn", the mean of the neighbors and the node; "pool", the
        largest of `relu(features @ weight + bias)`, elementwise; "lstm", the last hidden state of an
        LSTM that reads the neighbors in the order of the edges, for which a graph under jit needs
        `formats=("mailbox",)`. Nodes without edges have 0.
      aggregator_weights: for "pool" a weight [in, in] and a bias [in]; for "lstm" the weights of input
        and of hidden state, [in, 4 in] each, and their biases [4 in], with gates in torch's order.
      edge_weight: floating [edges], factors of the messages; means divide by the number of
        edges.
      feature_dropout: the fraction of the features' entries to drop.
      dropout_key: for dropout; required if the rate is not 0.
      activation: a function of the result.
      norm: a function applied after the activation.

    Returns:
      [nodes, out] in the promoted dtype of features, weights and bias; half under autocast.

    Raises:
      ValueError: a shape does not fit, weights are missing, the rate is not in [0, 1), the key is missing,
        or `aggregator` is unknown.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph, one = from_edges([0, 1], [2, 2], 3), jnp.ones((1, 1))
      >>> sage_conv(graph, jnp.array([[2.0], [4.0], [9.0]]), one, aggregator="gcn").ravel().tolist()
      [2.0, 4.0, 5.0]

    Reference: Hamilton et al., Inductive Representation Learning on Large Graphs,
    https://arxiv.org/abs/1706.02216; DGL's SAGEConv.
    """
    checked_word("aggregator", aggregator, AGGREGATORS)
    check_dropout("feature_dropout", feature_dropout, dropout_key)
    if (self_weight is None) != (aggregator == "gcn"):
        wants = "no self_weight" if aggregator == "gcn" else "a self_weight"
        raise ValueError(f"aggregator={aggregator!r} takes {wants}")
    graph = as_graph(graph, features)
    kernel = as_floats("weight", weight, "in", "out")
    width, out = kernel.shape
    is_linear = aggregator in ("mean", "gcn")
    rows = end_rows(graph, features, width, can_be_sparse=is_linear)
    self_kernel = as_optional("self_weight", self_weight, width, out)
    offset = as_optional("bias", bias, out)
    inner = _checked_inner(aggregator, aggregator_weights, width)
    edge_weight = as_edge_weight(graph, edge_weight)
    rows, (kernel, self_kernel, offset, *inner) = promoted_with(rows, kernel, self_kernel, offset, *inner)
    rows = rows.dropped(feature_dropout, dropout_key)

    if is_linear and (width > out or isinstance(rows.given, SparseFeatures)):
        products = rows.map(lambda features: product(features, kernel))
        result = _collect(graph, products, aggregator, (), edge_weight)
    else:
        result = product(_collect(graph, rows, aggregator, inner, edge_weight), kernel)
    if self_kernel is None:
        result = with_bias(result, offset)
    else:
        result = rows.of_receivers(lambda features: dense(features, self_kernel, offset)) + result
    return activated(result, activation, norm)


def _inner_shapes(aggregator: str, width: int) -> tuple[tuple[int, ...], ...]:
    if aggregator == "lstm":
        return ((width, 4 * width), (width, 4 * width), (4 * width,), (4 * width,))
    return ((width, width), (width,)) if aggregator == "pool" else ()


def _checked_inner(aggregator: str, weights: Sequence[Floats], width: int) -> list[jax.Array]:
    shapes = _inner_shapes(aggregator, width)
    if len(weights) != len(shapes):
        raise ValueError(f"aggregator={aggregator!r} takes {len(shapes)} aggregator_weights, got {len(weights)}")
    return [
        as_floats(f"aggregator_weights[{i}]", array, *shape)
        for i, (array, shape) in enumerate(zip(weights, shapes, strict=True))
    ]


def _collect(
    graph: Graph | Block,
    rows: EndRows,
    aggregator: str,
    inner: Sequence[jax.Array],
    edge_weight: jax.Array | None,
) -> jax.Array:
    if aggregator == "pool":
        rows = dataclasses.replace(rows, given=activated(dense(rows.given, *inner), jax.nn.relu))
    features = rows.senders
    if aggregator == "lstm":
        if isinstance(graph, Block):
            raise TypeError('aggregator="lstm" needs a Graph: blocks have no mailboxes')
        return lstm_aggregate(graph, features, inner, edge_weight)
    if aggregator == "gcn":
        return aggregate(graph.connections, features, edge_weight, after=_mean_with_self, receivers=rows.own_receivers)
    return aggregate(graph.connections, features, edge_weight, reduction="max" if aggregator == "pool" else "mean")


def _mean_with_self(adjacency: Adjacency, rows: jax.Array, total: jax.Array) -> jax.Array:
    sizes = (adjacency.in_degrees + 1).astype(rows.dtype)
    return (total + rows) / rows_like(sizes, rows)


def lstm_aggregate(
    graph: Graph,
    features: jax.Array,
    weights: Sequence[jax.Array],
    edge_weight: jax.Array | None = None,
) -> jax.Array:
    """Returns the last hidden state [nodes, width] of an LSTM that reads the neighbors' features; see `sage_conv`.

    Both states are float32, because slow changes of a state stagnate in half precision. The gradient recomputes
    the gates.
    """
    edges = {} if edge_weight is None else {"weight": edge_weight}
    carrier = dataclasses.replace(graph, nodes={"h": features}, edges=edges)

    def message(edges: EdgeBatch) -> dict[str, jax.Array]:
        return {"m": graph_storage(_weighted(edges.src["h"], edges.data.get("weight")))}

    def reduce(nodes: NodeBatch) -> dict[str, jax.Array]:
        return {"last": graph_storage(_last_state(nodes.mailbox["m"], *weights))}

    nodes = update_all(carrier, message, reduce).nodes
    return nodes["last"] if "last" in nodes else jnp.zeros_like(features)


@autocast_as("float32")
def _weighted(rows: jax.Array, weight: jax.Array | None) -> jax.Array:
    if weight is None:
        return rows
    messages = upcast(rows)
    return (messages * rows_like(weight.astype(messages.dtype), rows)).astype(rows.dtype)


@autocast_as("tf32")
def _last_state(messages: jax.Array, *weights: jax.Array) -> jax.Array:
    """Returns the hidden state [nodes, width] after messages [nodes, degree, width], in their dtype."""
    weights = tuple(map(upcast, weights))

    @jax.checkpoint
    def step(state: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        return lstm_cell(weights, upcast(row), state), None

    start = jnp.zeros((messages.shape[0], messages.shape[2]), weights[0].dtype)
    (hidden, _), _ = jax.lax.scan(step, (start, start), jnp.moveaxis(messages, 1, 0))
    return hidden.astype(messages.dtype)


class SAGEConv(DropoutConvolution, of=sage_conv):
    """The layer of `sage_conv`: `layer(graph, features, edge_weight=None)`.

    Weights have a Glorot uniform initializer with gain sqrt(2); biases and the LSTM's parameters are
    uniform between -1 and 1 over the square root of the width; the bias of "gcn" is 0.

    Args:
      in_features: the width of the features.
      out_features: the width of the result.
      aggregator: see `sage_conv`.
      feature_dropout: see `sage_conv`; `train` and `eval` switch it on and off.
      use_bias: whether there is a bias.
      norm: see `sage_conv`; an nnx module or a function.
      activation: see `sage_conv`.
      dtype: dtype to which features and parameters are cast; None for their promoted dtype.
      param_dtype: the parameters' dtype.
      rngs: flax's random streams "params" and, for dropout, "dropout".

    Raises:
      ValueError: `aggregator` is unknown, or the rate is not in [0, 1).

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = SAGEConv(4, 8, aggregator="pool", activation=nnx.relu, rngs=nnx.Rngs(0))
      >>> layer(graph, jnp.ones((3, 4))).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    _: dataclasses.KW_ONLY
    aggregator: str = "mean"
    feature_dropout: float = 0.0
    use_bias: bool = True
    norm: Activation | None = None
    activation: Activation | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("aggregator", self.aggregator, AGGREGATORS)
        self.dropout_keys = DropoutKeys(rngs, feature_dropout=self.feature_dropout)
        draw, is_gcn = Drawing(rngs, self.param_dtype), self.aggregator == "gcn"
        glorot = nnx.initializers.variance_scaling(2.0, "fan_avg", "uniform")
        uniform = uniform_between(self.in_features**-0.5)
        self.weight = draw(glorot, self.in_features, self.out_features)
        self.self_weight = nnx.data(None if is_gcn else draw(glorot, self.in_features, self.out_features))
        of_bias = nnx.initializers.zeros if is_gcn else uniform
        self.bias = nnx.data(draw(of_bias, self.out_features) if self.use_bias else None)
        inits = {"pool": (glorot, uniform), "lstm": (uniform,) * 4}.get(self.aggregator, ())
        shapes = _inner_shapes(self.aggregator, self.in_features)
        self.aggregator_weights = nnx.List([draw(init, *shape) for init, shape in zip(inits, shapes, strict=True)])
