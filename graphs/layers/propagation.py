"""Propagation of features over several hops, by the normalized adjacency; norms of edge weights."""

import math
from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.layers.dense import Activation, activated, check_dropout, drop, product, with_bias
from jmp_train.graphs.layers.gcn import NORMS, degree_scales
from jmp_train.graphs.layers.layer_inputs import as_edge_weight, as_floats, as_graph, as_optional, end_rows, promoted
from jmp_train.graphs.structure import (
    Adjacency,
    AnyBatch,
    Block,
    Graph,
    Incidence,
    SparseFeatures,
    accumulation_dtype,
    as_count,
    checked_word,
    from_jraph,
    graph_storage,
    rows_like,
    upcast,
)
from jmp_train.policies import autocast_as
from jmp_train.policies.pytrees import check_number

Combine = Callable[[jax.Array], jax.Array]


class Hop(Protocol):
    """A product with the normalized adjacency: from rows [nodes, ...] to rows of the same shape and dtype."""

    def __call__(
        self, rows: jax.Array, combine: Combine | None = None, edge_weight: jax.Array | None = None
    ) -> jax.Array:
        """Returns the product.

        Args:
          rows: floating [nodes, ...].
          combine: returns the result, given the product before rounding.
          edge_weight: see `make_hop`, in place of its weights.
        """
        ...


def make_hop(graph: Graph, norm: str, edge_weight: jax.Array | None, features: jax.Array) -> Hop:
    """Returns the product with a graph's normalized adjacency, computed in float32 and rounded once.

    Args:
      graph: a graph.
      norm: see `graph_conv`.
      edge_weight: floating [edges], or None for 1.
      features: an array with the dtype of the rows.
    """
    sender_scale, receiver_scale = degree_scales(graph, checked_word("norm", norm, NORMS), features)

    def hop(rows: jax.Array, combine: Combine | None = None, edge_weight: jax.Array | None = edge_weight) -> jax.Array:
        def after(adjacency: Adjacency, own: jax.Array, total: jax.Array) -> jax.Array:
            del adjacency, own
            if receiver_scale is not None:
                total = total * rows_like(receiver_scale.astype(total.dtype), total)
            return total if combine is None else combine(total)

        return aggregate(graph.connections, rows, edge_weight, sender_scale=sender_scale, after=after)

    return hop


def as_whole_graph(graph: AnyBatch, features: Floats | SparseFeatures) -> Graph:
    """Returns a graph of ours or jraph's as ours; raises TypeError for blocks, whose targets cannot send again."""
    whole = as_graph(graph, features)
    if isinstance(whole, Block):
        raise TypeError("several hops need a Graph, got a Block: its targets do not send to each other")
    return whole


def propagate(
    graph: AnyBatch,
    features: Floats,
    k: int,
    *,
    alpha: float = 0.0,
    norm: str = "both",
    edge_weight: Floats | None = None,
    edge_dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Returns features after `k` hops, each of which adds a fraction `alpha` of the first features.

    A hop is `(1 - alpha) * neighbors + alpha * features`, where `neighbors` is the sum of the neighbors' rows, scaled
    by degrees. It is computed in float32 and stored in the features' dtype. The hops are one `jax.lax.scan`.

    Args:
      graph: a graph of ours or jraph's, whose own features are not used.
      features: floating [nodes, ...].
      k: number of hops.
      alpha: a number in [0, 1].
      norm: see `graph_conv`.
      edge_weight: floating [edges], factors of the messages; see `edge_weight_norm` for weighted degrees.
      edge_dropout: the fraction of the edges to drop, different ones in each hop; the other edges are scaled up.
      dropout_key: for dropout; required if the rate is not 0.

    Returns:
      [nodes, ...] in the features' dtype; half under autocast.

    Raises:
      ValueError: a shape does not fit, `k` is negative, a rate or `alpha` is out of range, or `norm` is unknown.
      TypeError: an array is not floating, or the graph is a block.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> ring = from_edges([0, 1, 2, 3], [1, 2, 3, 0], 4)
      >>> propagate(ring, jnp.arange(4.0), 2).tolist()
      [2.0, 3.0, 0.0, 1.0]
      >>> propagate(ring, jnp.arange(4.0), 1, alpha=0.5).tolist()
      [1.5, 0.5, 1.5, 2.5]

    Reference: Wu et al., Simplifying Graph Convolutional Networks, https://arxiv.org/abs/1902.07153, with `alpha=0`;
    Klicpera et al., Predict then Propagate, https://arxiv.org/abs/1810.05997, with others.
    """
    check_dropout("edge_dropout", edge_dropout, dropout_key)
    check_number("alpha", alpha)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha} must be in [0, 1]")
    whole = as_whole_graph(graph, features)
    rows = as_floats("features", features, whole.num_nodes, ...)
    weight = as_edge_weight(whole, edge_weight)
    hop = make_hop(whole, norm, weight, rows)
    first = upcast(rows)  # because its gradient is a sum over the hops
    keys = None
    if edge_dropout and dropout_key is not None:
        keys = jax.random.split(dropout_key, as_count("k", k))
        if weight is None:
            weight = jnp.ones(whole.connections.receivers.num_edges, accumulation_dtype(rows.dtype))

    def restarted(neighbors: jax.Array) -> jax.Array:
        return (1 - alpha) * neighbors + alpha * first if alpha else neighbors

    def step(rows: jax.Array, key: jax.Array | None) -> tuple[jax.Array, None]:
        kept = weight if weight is None else drop(weight, edge_dropout, key)
        return hop(rows, restarted, kept), None

    # Each hop stores its rows itself: half carries would round the gradients between the hops.
    result, _ = jax.lax.scan(step, rows, keys, length=as_count("k", k))
    return graph_storage(result)


def is_narrowing(rows: jax.Array | SparseFeatures, weight: jax.Array) -> bool:
    """Returns whether the products of rows [nodes, in] with weights [..., in, out] come before the hops.

    They do if that makes the rows of the hops narrower, and for sparse rows, which only a product turns into an array.
    """
    return isinstance(rows, SparseFeatures) or weight.shape[-2] > weight.shape[-1]


def sum_of_terms(
    whole: Graph,
    features: Floats | SparseFeatures,
    weight: Floats,
    bias: Floats | None,
    count: str,
    add: Callable[[Hop, jax.Array], jax.Array],
    make: Callable[[Hop, jax.Array, int], jax.Array],
    *,
    norm: str,
    edge_weight: Floats | None,
    activation: Activation | None,
) -> jax.Array:
    """Returns the sum of a few terms that hops make of features, each times a weight, [nodes, out].

    Args:
      whole: the graph.
      features: floating [nodes, in], or `SparseFeatures`.
      weight: floating [terms, in, out], of at least one term.
      bias: floating [out], or None.
      count: meaning of the first axis of `weight`, for messages.
      add: returns the sum of the terms, given the hop and the products of the features with each weight,
        [terms, nodes, out]; called if these are narrower than the features.
      make: returns the terms [terms, nodes, in], given the hop, the features and the number of terms.
      norm: see `graph_conv`.
      edge_weight: floating [edges], or None.
      activation: a function of the result.

    Raises:
      TypeError: an array is not floating.
      ValueError: a shape does not fit, or there are no terms.
    """
    kernel = as_floats("weight", weight, count, "in", "out")
    if len(kernel) == 0:
        raise ValueError(f"weight must have at least one of {count}, got shape {kernel.shape}")
    terms, width, out = kernel.shape
    rows = end_rows(whole, features, width, can_be_sparse=True).senders
    rows, kernel, offset = promoted(rows, kernel, as_optional("bias", bias, out))
    hop = make_hop(whole, norm, as_edge_weight(whole, edge_weight), rows)
    if is_narrowing(rows, kernel):
        wide = product(rows, jnp.moveaxis(kernel, 0, 1).reshape(width, terms * out))
        result = add(hop, jnp.moveaxis(wide.reshape(-1, terms, out), 1, 0))
    else:
        wide = jnp.moveaxis(make(hop, rows, terms), 0, 1).reshape(len(rows), terms * width)
        result = product(wide, kernel.reshape(terms * width, -1))
    return activated(with_bias(result, offset), activation)


# The powers of the weights that leave the sender, that enter the sender, and that enter the receiver.
POWERS_OF_DEGREES = {"both": (-0.5, 0, -0.5), "left": (-1, 0, 0), "right": (0, 0, -1), "in": (0, -0.5, -0.5)}


def edge_weight_norm(graph: AnyBatch, edge_weight: Floats | None = None, *, norm: str = "both") -> jax.Array:
    """Returns edge weights, divided by sums of the weights at both ends of each edge, in float32.

    The layers count edges: their `norm` divides by numbers of edges, whatever the weights. Pass the result as their
    `edge_weight`, with `norm="none"`, to divide by weighted degrees. Weights of mini-batches are those of the whole
    graph, `normalized[block.edge_ids]`.

    Args:
      graph: a graph of ours or jraph's, padded or not.
      edge_weight: floating [edges], with sums at least 0; None for 1.
      norm: "both" divides by the square root of the sum of the weights that leave the sender, times the sum of those
        that enter the receiver; "in" by that of the weights that enter the sender, times those that enter the receiver;
        "left" by the sum of the weights that leave the sender; "right" by that of those that enter the receiver.

    Returns:
      Float32 or higher precision [edges]; 0 where a sum is 0, and for padding edges.

    Raises:
      ValueError: the weights have another shape, or `norm` is unknown.
      TypeError: the weights are not floating, or the graph is a block.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.graphs import from_edges
      >>> graph, weight = from_edges([0, 1, 0], [1, 1, 0], 2), jnp.array([3.0, 1.0, 1.0])
      >>> edge_weight_norm(graph, weight, norm="right").tolist()
      [0.75, 0.25, 1.0]
      >>> edge_weight_norm(graph, weight).tolist()
      [0.75, 0.5, 0.5]

    Reference: Kipf and Welling, Semi-Supervised Classification with Graph Convolutional Networks,
    https://arxiv.org/abs/1609.02907; DGL's EdgeWeightNorm; with "in", PyTorch Geometric's gcn_norm.
    """
    powers = POWERS_OF_DEGREES[checked_word("norm", norm, POWERS_OF_DEGREES)]
    whole = as_whole_graph(from_jraph(graph) if isinstance(graph, jraph.GraphsTuple) else graph, 0.0)
    out, into = whole.connections.senders, whole.connections.receivers
    weight = as_edge_weight(whole, jnp.ones(into.num_edges) if edge_weight is None else edge_weight)
    assert weight is not None  # for the type checker

    @autocast_as("float32")
    def normalized(weight: jax.Array) -> jax.Array:
        weight = jnp.where(into.is_counted, upcast(weight), 0)
        ends = (out, out), (into, out), (into, into)  # whose weights are added up, and where the sum is read
        factors = [_scale(*end, weight, power) for end, power in zip(ends, powers, strict=True) if power]
        return math.prod(factors, start=weight)

    return normalized(weight)


def _scale(summed: Incidence, read: Incidence, weight: jax.Array, power: float) -> jax.Array:
    """Returns a power of the sum of the weights at one end of each edge [edges]; 0 for 0."""
    sums = jax.lax.optimization_barrier(summed.sum(weight))  # both comparisons must see the same
    return read.read(jnp.where(sums == 0, 0, jnp.where(sums == 0, 1, sums) ** power))
