"""Edge convolution (EdgeConv): the maximum of a network applied to a node and its difference to each neighbor."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.kernels import REDUCTIONS, BlockReduction, EdgeOperation, Messages, reduce_blocks
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.layers.dense import activated
from jmp_train.graphs.layers.layer import Drawing, DrawnLayer
from jmp_train.graphs.layers.layer_inputs import (
    AnyEdges,
    EndFeatures,
    as_floats,
    as_graph,
    as_optional,
    end_rows,
    promoted_with,
)
from jmp_train.graphs.structure import Adjacency, checked_word, graph_storage, in_float32, rows_like, upcast
from jmp_train.policies import autocast_as

AGGREGATORS: tuple[BlockReduction, ...] = ("max", "sum", "mean")
Apply = Callable[[jax.Array], jax.Array]


def edge_conv(
    graph: AnyEdges,
    features: EndFeatures,
    weight: Floats,
    bias: Floats | None = None,
    apply: Apply | None = None,
    *,
    aggregator: str = "max",
    implementation: str | None = None,
) -> jax.Array:
    """Returns the largest of `apply([x_v, x_u - x_v] @ weight + bias)` over the senders u of each node v.

    The first product is computed per node instead of per edge: it is `x_v @ (upper - lower) + bias` for the receiver
    plus `x_u @ lower` for the sender, where `upper` and `lower` are the halves of the weight. Both are float32, so that
    little is lost if they cancel, and their sum is rounded once. Without `apply`, the receiver's part is added to
    the largest of the senders' parts, and nothing is computed per edge.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used, or a block.
      features: floating [nodes, in]; for a block those of its sources, or a pair, see `Block`.
      weight: floating [2 * in, out], for the receiver's features and then for the difference.
      bias: floating [out].
      apply: the rest of the network, a function of rows [..., out] that treats all rows alike, such as an activation
        and a further layer; None for nothing.
      aggregator: "max", "sum" or "mean".
      implementation: "chunked" stores nothing per edge, and recomputes it for the gradient; "xla" has arrays of all
        edges, and also supports modules that change their state, such as batch norms in training. None chooses
        "chunked" if the graph has sorted edges and a million elements or more.

    Returns:
      [nodes, ...] in the dtype of `apply`'s result, 0 for nodes without incoming edges; half under autocast. If
      several are the largest, they share the gradient.

    Raises:
      ValueError: a shape does not fit, `aggregator` is unknown, or the edges are not sorted.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph = from_edges([0, 1], [2, 2], 3)
      >>> weight = jnp.array([[0.0], [1.0]])  # of the difference only
      >>> edge_conv(graph, jnp.array([[5.0], [9.0], [2.0]]), weight, apply=lambda rows: 2 * rows).ravel().tolist()
      [0.0, 0.0, 14.0]

    Reference: Wang et al., Dynamic Graph CNN for Learning on Point Clouds, https://arxiv.org/abs/1801.07829; PyTorch
    Geometric's EdgeConv, and DGL's, which is without `apply`.
    """
    reduction = checked_word("aggregator", aggregator, AGGREGATORS)
    graph = as_graph(graph, features)
    kernel, width = checked_halves(weight)
    rows = end_rows(graph, features, width)
    rows, (kernel, offset) = promoted_with(rows, kernel, as_optional("bias", bias, kernel.shape[1]))
    senders, receivers = of_ends(rows.senders, rows.receivers, kernel, offset)
    adjacency = graph.connections
    if apply is None:
        return _without_network(adjacency, senders, receivers, reduction, rows.senders.dtype)
    return EDGE_FUNCTION(implementation, adjacency, senders, receivers, apply, reduction, rows.senders.dtype)


def checked_halves(weight: Floats) -> tuple[jax.Array, int]:
    """Returns a checked weight [2 * in, out], and the width of the features.

    Args:
      weight: see `edge_conv`.
    """
    kernel = as_floats("weight", weight, "2 * in", "out")
    width = kernel.shape[0] // 2
    return as_floats("weight", kernel, 2 * width, kernel.shape[1]), width


def of_ends(
    senders: jax.Array, receivers: jax.Array, weight: jax.Array, bias: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Returns the senders' and the receivers' parts of the first product, in float32 or higher precision."""

    @autocast_as("float32")
    def parts(senders: jax.Array, receivers: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        upper, lower = jnp.split(upcast(weight), 2)
        here = upcast(receivers) @ (upper - lower)
        return upcast(senders) @ lower, here if bias is None else here + upcast(bias)

    return parts(graph_storage(senders), graph_storage(receivers), weight)


def _without_network(
    adjacency: Adjacency, senders: jax.Array, receivers: jax.Array, reduction: BlockReduction, dtype: DTypeLike
) -> jax.Array:
    """Returns the reduction of sums of both parts, [receivers, out]."""

    def with_receiver(adjacency: Adjacency, here: jax.Array, reduced: jax.Array) -> jax.Array:
        degrees = rows_like(adjacency.in_degrees.astype(here.dtype), here)
        here = degrees * here if reduction == "sum" else here
        return jnp.where(degrees > 0, reduced + here, jnp.zeros_like(here))

    result = aggregate(adjacency, senders, reduction=reduction, after=with_receiver, receivers=receivers)
    return graph_storage(result.astype(dtype))


def _elements(
    senders: jax.Array, receivers: jax.Array, apply: Apply, reduction: BlockReduction, dtype: DTypeLike
) -> int:
    """Returns the number of elements per edge at the input of the network."""
    del receivers, apply, reduction, dtype
    return senders.shape[1]


def _by_xla(
    adjacency: Adjacency,
    senders: jax.Array,
    receivers: jax.Array,
    apply: Apply,
    reduction: BlockReduction,
    dtype: DTypeLike,
) -> jax.Array:
    read = autocast_as("float32")(lambda u, v: adjacency.senders.read(u) + adjacency.receivers.read(v))
    messages = activated(graph_storage(read(senders, receivers).astype(dtype)), apply)
    return in_float32(lambda rows: REDUCTIONS[reduction](adjacency, upcast(rows)), messages)


def _by_chunks(
    adjacency: Adjacency,
    senders: jax.Array,
    receivers: jax.Array,
    apply: Apply,
    reduction: BlockReduction,
    dtype: DTypeLike,
) -> jax.Array:
    assert adjacency.neighbors is not None
    messages = messages_of(senders, receivers, apply, dtype)
    return graph_storage(reduce_blocks(adjacency.neighbors.by_target, messages, reduction))


def messages_of(senders: jax.Array, receivers: jax.Array, apply: Apply, dtype: DTypeLike) -> Messages:
    """Returns the function from ids of senders and receivers to messages.

    Args:
      senders: see `of_ends`.
      receivers: see `of_ends`.
      apply: see `edge_conv`.
      dtype: dtype of the rows passed to `apply`.
    """

    def rows(data: jax.Array, ids: jax.Array) -> jax.Array:
        data = data if len(data) else jnp.zeros((1, *data.shape[1:]), data.dtype)  # jax traces no reads of 0 rows
        return data.at[ids].get(mode="clip")

    read = autocast_as("float32")(lambda u, v: rows(senders, u) + rows(receivers, v))
    return lambda u, v: activated(graph_storage(read(u, v).astype(dtype)), apply)


EDGE_FUNCTION = EdgeOperation({"xla": _by_xla, "chunked": _by_chunks}, _elements)


class EdgeConv(DrawnLayer, of=edge_conv):
    """The layer of `edge_conv`: `layer(graph, features)`.

    The weight [2 * in, out] and the bias [out] have torch's uniform initializer for linear layers.

    Args:
      in_features: the width of the features.
      out_features: the width of the first product, and of the result without `apply`.
      apply: see `edge_conv`; an nnx module or a function.
      aggregator: see `edge_conv`.
      use_bias: whether there is a bias.
      implementation: see `edge_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype.
      param_dtype: the dtype of weight and bias.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `aggregator` is unknown.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jmp_train.graphs import from_edges
      >>> graph, rngs = from_edges([0, 1, 2], [1, 2, 0], 3), nnx.Rngs(0)
      >>> network = nnx.Sequential(nnx.relu, nnx.Linear(16, 8, rngs=rngs))
      >>> EdgeConv(4, 16, network, rngs=rngs)(graph, jnp.ones((3, 4))).shape
      (3, 8)
    """

    in_features: int
    out_features: int
    apply: Apply | None = None
    _: dataclasses.KW_ONLY
    aggregator: str = "max"
    use_bias: bool = True
    implementation: str | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("aggregator", self.aggregator, AGGREGATORS)
        draw = Drawing(rngs, self.param_dtype)
        width = 2 * self.in_features
        self.weight = draw.linear(width, width, self.out_features)
        self.bias = nnx.data(draw.linear(width, self.out_features) if self.use_bias else None)

    def __call__(self, graph: AnyEdges, features: EndFeatures) -> jax.Array:
        """Returns the convolution [nodes, ...], for the arguments of `edge_conv`."""
        return self.call(graph, self.cast(features))
