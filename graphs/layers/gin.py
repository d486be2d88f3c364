"""The layer of graph isomorphism networks (GIN): an MLP of the sum of a node's features and its neighbors'."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.fn import Reduction
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.layers.dense import Activation, activated, checked_eps
from jmp_train.graphs.layers.layer import Layer
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_edge_weight,
    as_graph,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import Adjacency, AnyBatch, checked_word

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
