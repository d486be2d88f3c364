"""The kernels of graph attention, of GAT and of GATv2: in chunks, or on arrays of all edges, which XLA may fuse."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention_weights import EdgeDropout
from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.gat import GATInputs, chunked_gat
from jmp_train.graphs.kernels.gatv2 import GATv2Inputs, chunked_gatv2
from jmp_train.graphs.kernels.implementations import EdgeOperation
from jmp_train.graphs.structure import Adjacency, upcast
from jmp_train.policies.autocasting import autocast_as

LogitsAndMessages = Callable[[float, Adjacency, Any], tuple[jax.Array, jax.Array]]


def attention_by_xla(
    logits_and_messages: LogitsAndMessages,
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATInputs | GATv2Inputs,
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
    inputs: GATInputs | GATv2Inputs,
) -> jax.Array:
    logits, messages = logits_and_messages(negative_slope, adjacency, inputs)
    return _weighted_sum(adjacency, logits, messages, inputs.edge_weight, dropout)


def gat_logits(negative_slope: float, adjacency: Adjacency, inputs: GATInputs) -> tuple[jax.Array, jax.Array]:
    """Returns the logits [edges, heads] and the messages [edges, heads, width] of GAT."""
    left = adjacency.senders.read(upcast(inputs.left))
    logits = jax.nn.leaky_relu(left + adjacency.receivers.read(upcast(inputs.right)), negative_slope)
    return logits, adjacency.senders.read(upcast(inputs.features))


def gatv2_logits(negative_slope: float, adjacency: Adjacency, inputs: GATv2Inputs) -> tuple[jax.Array, jax.Array]:
    """Returns the logits [edges, heads] and the messages [edges, heads, width] of GATv2."""
    messages = adjacency.senders.read(upcast(inputs.left))
    both = messages + adjacency.receivers.read(upcast(inputs.right))
    both = jax.nn.leaky_relu(both, negative_slope)
    return (inputs.attention.astype(both.dtype) * both).sum(-1), messages


def _weighted_sum(
    adjacency: Adjacency,
    logits: jax.Array,
    messages: jax.Array,
    edge_weight: jax.Array | None,
    dropout: EdgeDropout | None,
) -> jax.Array:
    weights = adjacency.receivers.softmax(logits)
    if dropout is not None:
        weights = weights * dropout.of_edges(jnp.arange(len(weights))).astype(weights.dtype)
    if edge_weight is not None:
        weights = weights * edge_weight.astype(weights.dtype)[:, None]
    return adjacency.receivers.sum(weights[..., None] * messages)


def _by_chunks(
    kernel: Callable[..., Any],
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATInputs | GATv2Inputs,
) -> jax.Array:
    sent = inputs.sent
    if sent.size == 0:
        return jnp.zeros((adjacency.num_receivers, *sent.shape[1:]), sent.dtype)
    return run_chunked(functools.partial(kernel, negative_slope), adjacency.neighbors, dropout, inputs)


def _elements_per_edge(negative_slope: float, dropout: EdgeDropout | None, inputs: GATInputs | GATv2Inputs) -> int:
    del negative_slope, dropout
    _, heads, width = inputs.sent.shape
    return heads * width


GAT = EdgeOperation(
    {
        "xla": functools.partial(attention_by_xla, gat_logits),
        "chunked": functools.partial(_by_chunks, chunked_gat),
    },
    _elements_per_edge,
)
GATV2 = EdgeOperation(
    {
        "xla": functools.partial(attention_by_xla, gatv2_logits),
        "chunked": functools.partial(_by_chunks, chunked_gatv2),
    },
    _elements_per_edge,
)
