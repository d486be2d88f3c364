"""Edge convolution (EdgeConv): the maximum of a network applied to a node and its difference to each neighbor.

In dynamic edge convolution, the neighbors of a point are those with the nearest features.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.kernels import (
    CHUNKED_ELEMENTS,
    REDUCTIONS,
    BlockReduction,
    EdgeOperation,
    Messages,
    reduce_blocks,
)
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
    promoted,
    promoted_with,
)
from jmp_train.graphs.structure import (
    CSR,
    Adjacency,
    as_count,
    checked_word,
    graph_storage,
    in_float32,
    largest_over,
    rows_like,
    upcast,
)
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


ROWS = 256  # rows of distances computed at a time


def nearest_points(points: Floats, k: int, mask: ArrayLike | None = None) -> jax.Array:
    """Returns the indices of the `k` nearest points of each point, including itself; on the device, and under jit.

    Args:
      points: floating [..., points, dimensions]; leading axes are clouds. Distances are Euclidean, in float32.
      k: number of points.
      mask: bool [..., points], False for padding; None for all points.

    Returns:
      Int32 [..., points, min(k, points)], the nearest first. Padding comes after all points.

    Raises:
      ValueError: a shape does not fit, or `k` is 0.
      TypeError: points are not floating, or `k` is not an integer.

    Example:
      >>> import jax.numpy as jnp
      >>> nearest_points(jnp.array([[0.0], [1.0], [3.0]]), 2).tolist()
      [[0, 1], [1, 0], [2, 1]]
    """
    array = as_floats("points", points, *_shape(points), "points", "dimensions")
    as_count("k", k, least=1)
    return _nearest(array, k, _checked_mask(mask, array))


def _shape(points: Floats) -> tuple[int, ...]:
    return jnp.shape(jnp.asarray(points))[:-2]


def _checked_mask(mask: ArrayLike | None, points: jax.Array) -> jax.Array:
    """Returns the mask of points, bool [..., points]."""
    if mask is None:
        return jnp.ones(points.shape[:-1], bool)
    array = jnp.asarray(mask)
    if array.dtype != bool or array.shape != points.shape[:-1]:
        raise ValueError(f"mask must be bool {points.shape[:-1]}, got {array.dtype} {array.shape}")
    return array


@autocast_as("float32")
def _nearest(points: jax.Array, k: int, mask: jax.Array) -> jax.Array:
    """Returns the indices of the nearest points, without gradients."""
    if points.ndim > 2:
        return jax.vmap(lambda points, mask: _nearest(points, k, mask))(points, mask)
    points = upcast(jax.lax.stop_gradient(points))
    count = points.shape[0]
    inside = jnp.where(mask[:, None], points, jnp.zeros_like(points))
    # Centered, because far from the origin the products of points cancel.
    points = points - inside.sum(0) / jnp.maximum(mask.sum(), 1).astype(points.dtype)
    squares = jnp.where(mask, (points * points).sum(1), jnp.inf)

    def of_row(point: jax.Array) -> jax.Array:
        # Without its own square, which is the same for all others.
        distances = squares - 2 * jnp.matmul(points, point, precision="highest")
        return jax.lax.top_k(-distances, min(k, count))[1].astype(jnp.int32)

    return jax.lax.map(of_row, points, batch_size=min(ROWS, max(count, 1)))


def dynamic_edge_conv(
    features: Floats,
    weight: Floats,
    bias: Floats | None = None,
    apply: Apply | None = None,
    *,
    k: int,
    mask: ArrayLike | None = None,
    aggregator: str = "max",
    implementation: str | None = None,
) -> jax.Array:
    """Returns `edge_conv` of clouds in which the `k` points with the nearest features send to each point.

    The nearest points are found in float32 in each call, without gradient; a point is its own nearest point.

    Args:
      features: floating [..., points, in]; leading axes are clouds.
      weight: see `edge_conv`.
      bias: see `edge_conv`.
      apply: see `edge_conv`.
      k: number of points that send to each.
      mask: bool [..., points], False for padding; None for all points.
      aggregator: see `edge_conv`.
      implementation: see `edge_conv`.

    Returns:
      [..., points, out] in the dtype of `apply`'s result, 0 for padding; half under autocast.

    Raises:
      ValueError: a shape does not fit, `k` is 0, or a word is unknown.
      TypeError: an array is not floating.

    Example:
      >>> import jax.numpy as jnp
      >>> points = jnp.array([[0.0], [1.0], [5.0]])
      >>> weight = jnp.array([[0.0], [1.0]])  # of the difference only
      >>> dynamic_edge_conv(points, weight, k=2).ravel().tolist()
      [1.0, 0.0, 0.0]

    Reference: Wang et al., Dynamic Graph CNN for Learning on Point Clouds, https://arxiv.org/abs/1801.07829; PyTorch
    Geometric's DynamicEdgeConv.
    """
    reduction = checked_word("aggregator", aggregator, AGGREGATORS)
    words = ("xla", "chunked")
    chosen = None if implementation is None else checked_word("implementation", implementation, words)
    kernel, width = checked_halves(weight)
    rows = as_floats("features", features, *_shape(features), "points", width)
    as_count("k", k, least=1)
    rows, kernel, offset = promoted(rows, kernel, as_optional("bias", bias, kernel.shape[1]))
    is_point = _checked_mask(mask, rows)
    edges = _nearest_edges(_nearest(rows, k, is_point), is_point)
    flat = rows.reshape(-1, width)
    messages = messages_of(*of_ends(flat, flat, kernel, offset), apply or (lambda rows: rows), rows.dtype)
    is_large = edges.num_edges * kernel.shape[1] >= CHUNKED_ELEMENTS
    if chosen == "chunked" or (chosen is None and is_large):
        result = graph_storage(reduce_blocks(edges, messages, reduction))
    else:
        result = _whole(edges, messages, reduction)
    return result.reshape(*rows.shape[:-1], *result.shape[1:])


def _nearest_edges(nearest: jax.Array, mask: jax.Array) -> CSR:
    """Returns the edges into each point of all clouds, with one block per point."""
    *clouds, points, width = nearest.shape
    count = mask.size
    firsts = jnp.arange(0, count, max(points, 1), dtype=jnp.int32).reshape(*clouds, 1, 1)
    sizes = jnp.minimum(mask.sum(-1, keepdims=True, dtype=jnp.int32), width)
    degrees = jnp.where(mask, sizes, 0).ravel()
    nodes = jnp.arange(count, dtype=jnp.int32)
    return CSR(
        others=(nearest + firsts).ravel(),
        edges=None,
        slots=None,
        starts=nodes * width,
        counts=degrees,
        nodes=nodes,
        rows=nodes,
        further=(),
        degrees=degrees,
        width=width,
        num_edges=count * width,
    )


def _whole(edges: CSR, messages: Messages, reduction: BlockReduction) -> jax.Array:
    """Returns the reduction of the messages of all edges, [points, ...]."""
    rows = messages(edges.others, jnp.repeat(edges.nodes, edges.width))
    is_edge = (jnp.arange(edges.width) < edges.counts[:, None])[..., None]

    def reduce(rows: jax.Array) -> jax.Array:
        rows = upcast(rows).reshape(*is_edge.shape[:2], -1)
        if reduction == "max":
            return jnp.where(edges.degrees[:, None] > 0, largest_over(jnp.where(is_edge, rows, -jnp.inf), 1), 0)
        total = jnp.where(is_edge, rows, 0).sum(1)
        return total / jnp.maximum(edges.degrees, 1)[:, None].astype(total.dtype) if reduction == "mean" else total

    return in_float32(reduce, rows)


class DynamicEdgeConv(DrawnLayer, of=dynamic_edge_conv):
    """The layer of `dynamic_edge_conv`: `layer(features, mask=None)`.

    The weight [2 * in, out] and the bias [out] have torch's uniform initializer for linear layers.

    Args:
      in_features: the width of the features.
      out_features: the width of the first product, and of the result without `apply`.
      apply: see `edge_conv`; an nnx module or a function.
      k: number of points that send to each.
      aggregator: see `edge_conv`.
      use_bias: whether there is a bias.
      implementation: see `edge_conv`.
      dtype: dtype to which features, weight and bias are cast; None for their promoted dtype.
      param_dtype: the dtype of weight and bias.
      rngs: flax's random streams; "params" is used.

    Raises:
      ValueError: `aggregator` is unknown, or `k` is 0.

    Example:
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> layer = DynamicEdgeConv(3, 8, nnx.relu, k=4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((2, 10, 3))).shape  # two clouds of ten points
      (2, 10, 8)
    """

    in_features: int
    out_features: int
    apply: Apply | None = None
    _: dataclasses.KW_ONLY
    k: int
    aggregator: str = "max"
    use_bias: bool = True
    implementation: str | None = None

    def __post_init__(self, rngs: nnx.Rngs) -> None:
        checked_word("aggregator", self.aggregator, AGGREGATORS)
        as_count("k", self.k, least=1)
        draw = Drawing(rngs, self.param_dtype)
        width = 2 * self.in_features
        self.weight = draw.linear(width, width, self.out_features)
        self.bias = nnx.data(draw.linear(width, self.out_features) if self.use_bias else None)

    def __call__(self, features: Floats, mask: ArrayLike | None = None) -> jax.Array:
        """Returns the convolution [..., points, out], for the arguments of `dynamic_edge_conv`."""
        return self.call(self.cast(features), mask=mask)
