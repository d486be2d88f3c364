"""Attention with arrays of all edges, which XLA may fuse; the gradient computes them anew."""

import functools

import jax
import jax.numpy as jnp

from jmp_train.graphs.connections import Connections
from jmp_train.graphs.edge_dropout import EdgeDropout
from jmp_train.graphs.gat_streaming import GATInputs
from jmp_train.graphs.gatv2_streaming import GATv2Inputs
from jmp_train.graphs.storage import wide
from jmp_train.policies.autocast import autocast_as


def gat_by_xla(
    negative_slope: float,
    connections: Connections,
    dropout: EdgeDropout | None,
    inputs: GATInputs,
) -> jax.Array:
    """Returns attention [nodes, heads, width] in the features' dtype."""
    attend = autocast_as("float32")(functools.partial(_gat, negative_slope))
    return attend(connections, dropout, inputs).astype(inputs.features.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)
def _gat(
    negative_slope: float,
    connections: Connections,
    dropout: EdgeDropout | None,
    inputs: GATInputs,
) -> jax.Array:
    left = connections.sources.read(wide(inputs.left))
    logits = jax.nn.leaky_relu(left + connections.targets.read(wide(inputs.right)), negative_slope)
    messages = connections.sources.read(wide(inputs.features))
    return _weighted_sum(connections, logits, messages, inputs.edge_weight, dropout)


def gatv2_by_xla(
    negative_slope: float,
    connections: Connections,
    dropout: EdgeDropout | None,
    inputs: GATv2Inputs,
) -> jax.Array:
    """Returns attention [nodes, heads, width] in the dtype of `left`."""
    attend = autocast_as("float32")(functools.partial(_gatv2, negative_slope))
    return attend(connections, dropout, inputs).astype(inputs.left.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)
def _gatv2(
    negative_slope: float,
    connections: Connections,
    dropout: EdgeDropout | None,
    inputs: GATv2Inputs,
) -> jax.Array:
    messages = connections.sources.read(wide(inputs.left))
    both = messages + connections.targets.read(wide(inputs.right))
    both = jax.nn.leaky_relu(both, negative_slope)
    logits = (inputs.attention.astype(both.dtype) * both).sum(-1)
    return _weighted_sum(connections, logits, messages, inputs.edge_weight, dropout)


def _weighted_sum(
    connections: Connections,
    logits: jax.Array,
    messages: jax.Array,
    edge_weight: jax.Array | None,
    dropout: EdgeDropout | None,
) -> jax.Array:
    weights = connections.targets.softmax(logits)
    if dropout is not None:
        weights = weights * dropout.of_edges(jnp.arange(len(weights))).astype(weights.dtype)
    if edge_weight is not None:
        weights = weights * edge_weight.astype(weights.dtype)[:, None]
    return connections.targets.sum(weights[..., None] * messages)
