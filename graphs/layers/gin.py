"""Graph isomorphism networks (GIN): an MLP of the sum of a node and its neighbors; with edge features, GINE."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.fn import Reduce, Reduction
from jmp_train.graphs.kernels import EdgeOperation, Inputs, reduce_messages
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.layers.dense import Activation, activated, checked_eps
from jmp_train.graphs.layers.layer import Layer
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_features,
    as_edge_weight,
    as_graph,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import Adjacency, AnyBatch, accumulation_dtype, checked_word, graph_storage, upcast
from jmp_train.policies import autocast_as

AGGREGATORS: tuple[Reduction, ...] = ("sum", "max", "mean")


def gin_conv(
    graph: AnyEdges,
    features: EndFeatures,
    apply: Callable[[jax.Array], jax.Array] | None = None,
    eps: Floats = 0.0,
    aggregator: str = "sum",
    *,
    edge_weight: Floats | None = None,
    activation: Activation | None = None,
) -> jax.Array:
    """Returns `apply((1 + eps) * features + aggregate of the neighbors' features)`.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, ...]; for a block those of its sources, or a pair, see `Block`.
      apply: a function of the sum, such as a network; None for the sum itself.
      eps: a number, or an array [] or [1], the additional weight of a node relative to its neighbors.
      aggregator: "sum", "max" or "mean".
      edge_weight: floating [edges], factors of the messages.
      activation: a function of the result.

    Returns:
      The result of `apply` for [nodes, ...] in the features' dtype, summed in float32 and rounded
      once; half under autocast.

    Raises:
      ValueError: a shape does not fit, or `aggregator` is unknown.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [2, 2], 3)
      >>> gin_conv(graph, jnp.arange(1.0, 4), eps=1.0).tolist()
      [2.0, 4.0, 9.0]

    Reference: Xu et al., How Powerful are Graph Neural Networks?, https://arxiv.org/abs/1810.00826; DGL's
    GINConv.
    """
    reduction = checked_word("aggregator", aggregator, AGGREGATORS)
    graph = as_graph(graph, features)
    rows, _ = promoted_with(end_rows(graph, features, ...))
    eps = checked_eps(eps)

    def with_self(adjacency: Adjacency, rows: jax.Array, neighbors: jax.Array) -> jax.Array:
        del adjacency
        return (1 + eps.astype(rows.dtype)) * rows + neighbors

    edge_weight = as_edge_weight(graph, edge_weight)
    result = aggregate(
        graph.connections,
        rows.senders,
        edge_weight,
        reduction=reduction,
        after=with_self,
        receivers=rows.own_receivers,
    )
    return activated(result, apply, activation)


class GINConv(Layer, of=gin_conv):
    """The layer of `gin_conv`: `layer(graph, features, edge_weight=None)`.

    Args:
      apply: an nnx module or a function of the sum; None for the sum itself.
      aggregator: see `gin_conv`.
      init_eps: the initial value of eps.
      learn_eps: whether eps is a parameter, of shape [1].
      activation: see `gin_conv`.
      dtype: dtype to which features and eps are cast; None for the features' own.
      param_dtype: the dtype of eps.

    Raises:
      ValueError: `aggregator` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = GINConv(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), learn_eps=True)
      >>> layer(graph, jnp.ones((3, 4))).shape
      (3, 8)
    """

    apply: Callable[[jax.Array], jax.Array] | None = None
    _: dataclasses.KW_ONLY
    aggregator: str = "sum"
    init_eps: float = 0.0
    learn_eps: bool = False
    activation: Activation | None = None

    def __post_init__(self) -> None:
        checked_word("aggregator", self.aggregator, AGGREGATORS)
        self.eps = nnx.Param(jnp.full(1, self.init_eps, self.param_dtype)) if self.learn_eps else self.init_eps

    def __call__(self, graph: AnyBatch, features: Floats, edge_weight: Floats | None = None) -> jax.Array:
        """Returns the layer's result [nodes, ...], for the arguments of `gin_conv`."""
        return self.call(graph, self.cast(features), eps=self.eps, edge_weight=edge_weight)


def gine_conv(
    graph: AnyEdges,
    features: EndFeatures,
    edge_features: Floats,
    apply: Callable[[jax.Array], jax.Array] | None = None,
    eps: Floats = 0.0,
    *,
    activation: Activation | None = None,
) -> jax.Array:
    """Returns `apply((1 + eps) * features + sum of relu(features of the sender + features of the edge))`.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, width]; for a block those of its sources, or a pair, see `Block`.
      edge_features: floating [edges, width].
      apply: a function of the sum, such as a network; None for the sum itself.
      eps: a number, or an array [] or [1], the additional weight of a node relative to its neighbors.
      activation: a function of the result.

    Returns:
      The result of `apply` for [nodes, width] in the promoted dtype of both features, summed in float32 and
      rounded once; half under autocast.

    Raises:
      ValueError: a shape does not fit.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [2, 2], 3)
      >>> gine_conv(graph, jnp.array([[1.0], [2.0], [3.0]]), jnp.array([[0.5], [-4.0]])).ravel().tolist()
      [1.0, 2.0, 4.5]

    Reference: Hu et al., Strategies for Pre-training Graph Neural Networks, https://arxiv.org/abs/1905.12265; DGL's
    GINEConv.
    """
    graph = as_graph(graph, features)
    rows = end_rows(graph, features, "width")
    edges = as_edge_features(graph, edge_features, rows.senders.shape[1])
    rows, (edges,) = promoted_with(rows, edges)
    eps = checked_eps(eps)
    senders, receivers, edges = (graph_storage(x) for x in (rows.senders, rows.receivers, edges))
    neighbors = RECTIFIED_SUM(None, graph.connections, senders, edges)

    @autocast_as("float32")
    def with_self(own: jax.Array, neighbors: jax.Array) -> jax.Array:
        own = upcast(own)
        return (1 + eps.astype(own.dtype)) * own + neighbors

    result = with_self(receivers, neighbors)
    return activated(graph_storage(result.astype(rows.senders.dtype)), apply, activation)


def _rectified(fixed: object, inputs: Inputs) -> jax.Array:
    del fixed
    return jax.nn.relu(inputs.senders + inputs.edge)


def _by_xla(adjacency: Adjacency, senders: jax.Array, edges: jax.Array) -> jax.Array:
    """Returns the sums of messages [receivers, width] in float32 or higher precision; the gradient recomputes these."""

    @jax.checkpoint
    def added(adjacency: Adjacency, senders: jax.Array, edges: jax.Array) -> jax.Array:
        messages = _rectified((), Inputs(upcast(edges), adjacency.senders.read(upcast(senders))))
        return adjacency.receivers.sum(messages)

    return autocast_as("float32")(added)(adjacency, senders, edges)


def _by_chunks(adjacency: Adjacency, senders: jax.Array, edges: jax.Array) -> jax.Array:
    if not senders.size or not edges.size:
        return jnp.zeros((adjacency.num_receivers, senders.shape[1]), accumulation_dtype(senders.dtype))
    return reduce_messages(_rectified, adjacency, Inputs(edges, senders), [Reduce("sum", "m", "x")])["x"]


def _elements(senders: jax.Array, edges: jax.Array) -> int:
    """Returns the number of elements per message."""
    del edges
    return senders.shape[1]


RECTIFIED_SUM = EdgeOperation({"xla": _by_xla, "chunked": _by_chunks}, _elements)


class GINEConv(Layer, of=gine_conv):
    """The layer of `gine_conv`: `layer(graph, features, edge_features)`.

    Args:
      apply: an nnx module or a function of the sum; None for the sum itself.
      init_eps: the initial value of eps.
      learn_eps: whether eps is a parameter, of shape [1].
      activation: see `gine_conv`.
      dtype: dtype to which features and eps are cast; None for the features' own.
      param_dtype: the dtype of eps.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1, 2], [1, 2, 0], 3)
      >>> layer = GINEConv(nnx.Linear(4, 8, rngs=nnx.Rngs(0)), learn_eps=True)
      >>> layer(graph, jnp.ones((3, 4)), jnp.ones((3, 4))).shape
      (3, 8)
    """

    apply: Callable[[jax.Array], jax.Array] | None = None
    _: dataclasses.KW_ONLY
    init_eps: float = 0.0
    learn_eps: bool = False
    activation: Activation | None = None

    def __post_init__(self) -> None:
        self.eps = nnx.Param(jnp.full(1, self.init_eps, self.param_dtype)) if self.learn_eps else self.init_eps

    def __call__(self, graph: AnyEdges, features: EndFeatures, edge_features: Floats) -> jax.Array:
        """Returns the layer's result [nodes, ...], for the arguments of `gine_conv`."""
        return self.call(graph, self.cast(features), self.cast(edge_features), eps=self.eps)
