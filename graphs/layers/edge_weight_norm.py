"""Edge weights over the weighted degrees of both ends, as in the paper of graph convolutional networks."""

import math

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.layer_inputs import as_edge_weight
from jmp_train.graphs.layers.propagation import as_whole_graph
from jmp_train.graphs.structure import AnyBatch, Incidence, checked_word, from_jraph, upcast
from jmp_train.policies import autocast_as

# The powers of the weights that leave the sender, that enter the sender, and that enter the receiver.
NORMS = {"both": (-0.5, 0, -0.5), "left": (-1, 0, 0), "right": (0, 0, -1), "in": (0, -0.5, -0.5)}


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
    powers = NORMS[checked_word("norm", norm, NORMS)]
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
