"""Attention over edges, as GAT and GATv2 share it: softmax, edge weights, and dropout recomputed from a key.

In whole-edge arrays, which XLA may fuse, a kind of attention is its logits and messages. In chunks, it is a kernel.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.extend.random import threefry_2x32
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.chunks import Chunk, add_up, at, largest, of_edges, run_chunked
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.kernels.spmm_sddmm import edge_rows
from jmp_train.graphs.structure import CSR, Adjacency, CSRAndCSC, accumulation_dtype, finite_or_zero, reciprocal
from jmp_train.policies import autocast_as

Inputs = TypeVar("Inputs")


class AttentionInputs(Protocol):
    """The inputs of an attention: its messages, the factors of its weights, and what its logits need."""

    @property
    def sent(self) -> jax.Array:
        """The messages of the nodes [nodes, heads, width]."""
        ...

    @property
    def edge_weight(self) -> jax.Array | None:
        """Floating [edges], or None."""
        ...


# From negative slope, adjacency and inputs to logits [edges, heads] and messages [edges, heads, width].
LogitsAndMessages = Callable[[float, Adjacency, Any], tuple[jax.Array, jax.Array]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EdgeDropout:
    """The dropped edges of each head.

    Attributes:
      words: uint32 [heads, 2], a key of Threefry for each head.
      rate: the fraction of dropped edges.
    """

    words: jax.Array
    rate: float = dataclasses.field(metadata={"static": True})

    def of_edges(self, first: jax.Array, second: jax.Array | None = None) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge and head [..., heads].

        Args:
          first: int [...], the values that identify an edge.
          second: the same, if two values identify an edge.
        """
        second = jnp.zeros_like(first) if second is None else second
        counts = jnp.stack([first, second]).astype(jnp.uint32)
        draw = jax.vmap(lambda words: threefry_2x32((words[0], words[1]), counts)[0], out_axes=-1)
        is_kept = draw(self.words) >= jnp.uint32(int(self.rate * 2**32))
        return jnp.where(is_kept, jnp.float32(1 / (1 - self.rate)), jnp.float32(0))

    def of_chunk(self, neighbors: CSR, chunk: Chunk, *, nodes_are_receivers: bool) -> jax.Array:
        """Returns 0 or 1 / (1 - rate) for each edge [blocks, width, heads].

        Places identify edges or, without places, their two ends: then edges between the same two nodes are dropped
        together.

        Args:
          neighbors: the edges.
          chunk: a chunk of them.
          nodes_are_receivers: True if the edges enter the nodes by which they are sorted.
        """
        if neighbors.edges is not None:
            return self.of_edges(at(neighbors.edges, chunk.positions))
        nodes = jnp.broadcast_to(chunk.nodes[:, None], chunk.others.shape)
        ends = (chunk.others, nodes) if nodes_are_receivers else (nodes, chunk.others)
        return self.of_edges(*ends)


def edge_dropout(rate: float, key: jax.Array | None, heads: int) -> EdgeDropout | None:
    """Returns the dropout of edges; None if it is off.

    Args:
      rate: the fraction of dropped edges.
      key: a random key of any of jax's generators.
      heads: number of heads.
    """
    if not rate or key is None:
        return None
    return EdgeDropout(jax.random.bits(key, (heads, 2), jnp.uint32), rate)


def dropout_and_weight(
    neighbors: CSR,
    chunk: Chunk,
    dropout: EdgeDropout | None,
    edge_weight: jax.Array | None,
    *,
    nodes_are_receivers: bool,
) -> jax.Array | None:
    """Returns the factors of a chunk's weights [blocks, width, heads or 1]; None for 1.

    Args:
      neighbors: the edges.
      chunk: a chunk of them.
      dropout: the dropped edges.
      edge_weight: floating [edges].
      nodes_are_receivers: see `EdgeDropout.of_chunk`.
    """
    factor = None
    if dropout is not None:
        factor = dropout.of_chunk(neighbors, chunk, nodes_are_receivers=nodes_are_receivers)
    if edge_weight is None:
        return factor
    return times(edge_rows(neighbors, chunk, edge_weight)[..., None], factor)


def times(data: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Returns data times a factor in its dtype; None for 1."""
    return data if factor is None else data * factor.astype(data.dtype)


class Saved(NamedTuple, Generic[Inputs]):
    """The values that the gradient of attention needs; `largest` and `inverse` are those of `SoftmaxSum`."""

    edges: CSRAndCSC
    dropout: EdgeDropout | None
    inputs: Inputs
    largest: jax.Array
    inverse: jax.Array


class SoftmaxSum(NamedTuple):
    """A sum weighted by a softmax, and the values from which the gradient recomputes the softmax.

    Attributes:
      total: the sums [nodes, heads, width], in the features' dtype.
      largest: the largest logit, at least float32 [nodes, heads].
      inverse: 1 over the sum of the powers of the differences to it, of the same shape and dtype.
    """

    total: jax.Array
    largest: jax.Array
    inverse: jax.Array


def softmax_sum(
    neighbors: CSR,
    dropout: EdgeDropout | None,
    edge_weight: jax.Array | None,
    features: jax.Array,
    logits: Callable[[Chunk], jax.Array],
    elements_per_block: int,
) -> SoftmaxSum:
    """Returns the senders' features, weighted by a softmax over each node's edges.

    Args:
      neighbors: the edges, by the nodes that they enter.
      dropout: the dropped weights.
      edge_weight: floating [edges], which multiplies the weights.
      features: floating [senders, heads, width].
      logits: returns the logits of a chunk, upcast [blocks, width, heads].
      elements_per_block: see `add_up`.
    """
    _, heads, width = features.shape
    dtype = accumulation_dtype(features.dtype)
    of_head = jax.ShapeDtypeStruct((heads,), dtype)

    def highest(chunk: Chunk) -> jax.Array:
        return jnp.where(chunk.is_edge[..., None], logits(chunk), -jnp.inf).max(1).astype(dtype)

    most = finite_or_zero(largest(neighbors, highest, of_head, elements_per_block))

    def parts(chunk: Chunk) -> list[jax.Array]:
        terms = chunk.where_edge(jnp.exp(logits(chunk) - chunk.of_nodes(most)).astype(dtype))
        factor = dropout_and_weight(neighbors, chunk, dropout, edge_weight, nodes_are_receivers=True)
        return [chunk.sum_of_others(features, times(terms, factor)), terms.sum(1)]

    like = [jax.ShapeDtypeStruct((heads, width), dtype), of_head]
    total, sizes = add_up(neighbors, parts, like, elements_per_block, most)
    inverse = reciprocal(sizes)
    return SoftmaxSum((total * inverse[..., None]).astype(features.dtype), most, inverse)


def gradient_of_edge_weight(
    neighbors: CSR,
    dropout: EdgeDropout | None,
    edge_weight: jax.Array | None,
    weights_and_products: Callable[[Chunk], tuple[jax.Array, jax.Array]],
    dtype: DTypeLike,
    elements_per_block: int,
) -> jax.Array | None:
    """Returns the gradient of the edge weights in their dtype, or None without edge weights.

    Args:
      neighbors: see `softmax_sum`.
      dropout: see `softmax_sum`.
      edge_weight: see `softmax_sum`.
      weights_and_products: returns a chunk's softmax, and the products of the gradient and the senders' features,
        both upcast [blocks, width, heads].
      dtype: dtype of the edge weights.
      elements_per_block: see `add_up`.
    """
    if edge_weight is None:
        return None

    def of_each(chunk: Chunk) -> jax.Array:
        weights, products = weights_and_products(chunk)
        factor = dropout_and_weight(neighbors, chunk, dropout, None, nodes_are_receivers=True)
        return (times(weights, factor) * products).sum(-1)

    of_one = jax.ShapeDtypeStruct((), dtype)
    return of_edges(neighbors, of_each, of_one, elements_per_block).astype(edge_weight.dtype)


def attention_operation(
    logits_and_messages: LogitsAndMessages, chunked_kernel: Callable[..., Any]
) -> EdgeOperation[[float, EdgeDropout | None, AttentionInputs], jax.Array]:
    """Returns attention [nodes, heads, width] in the dtype of its messages, as an operation.

    Args:
      logits_and_messages: returns both for all edges.
      chunked_kernel: the operation in chunks: a function of negative slope, sorted edges, dropout and inputs.
    """
    return EdgeOperation(
        {
            "xla": functools.partial(_by_xla, logits_and_messages),
            "chunked": functools.partial(_by_chunks, chunked_kernel),
        },
        _elements_per_edge,
    )


def _by_xla(
    logits_and_messages: LogitsAndMessages,
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: AttentionInputs,
) -> jax.Array:
    """Returns attention [nodes, heads, width] in the dtype of the messages."""
    attend = autocast_as("float32")(functools.partial(_attend, logits_and_messages, negative_slope))
    return attend(adjacency, dropout, inputs).astype(inputs.sent.dtype)


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _attend(
    logits_and_messages: LogitsAndMessages,
    negative_slope: float,
    adjacency: Adjacency,
    dropout: EdgeDropout | None,
    inputs: AttentionInputs,
) -> jax.Array:
    logits, messages = logits_and_messages(negative_slope, adjacency, inputs)
    weights = adjacency.receivers.softmax(logits)
    if dropout is not None:
        weights = weights * dropout.of_edges(jnp.arange(len(weights))).astype(weights.dtype)
    if inputs.edge_weight is not None:
        weights = weights * inputs.edge_weight.astype(weights.dtype)[:, None]
    return adjacency.receivers.sum(weights[..., None] * messages)


def _by_chunks(
    kernel: Callable[..., Any],
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: AttentionInputs,
) -> jax.Array:
    sent = inputs.sent
    if sent.size == 0:
        return jnp.zeros((adjacency.num_receivers, *sent.shape[1:]), sent.dtype)
    return run_chunked(functools.partial(kernel, negative_slope), adjacency.neighbors, dropout, inputs)


def _elements_per_edge(negative_slope: float, dropout: EdgeDropout | None, inputs: AttentionInputs) -> int:
    del negative_slope, dropout
    _, heads, width = inputs.sent.shape
    return heads * width
