"""Attention on arrays of all edges, which XLA may fuse; the gradient recomputes them."""

import functools

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.dropout import EdgeDropout
from jmp_train.graphs.kernels.gat import GATInputs
from jmp_train.graphs.kernels.gatv2 import GATv2Inputs
from jmp_train.graphs.structure import Adjacency, upcast
from jmp_train.policies.autocasting import autocast_as


def gat_by_xla(
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATInputs,
) -> jax.Array:
    """Returns attention [nodes, heads, width] in the features' dtype."""
    attend = autocast_as("float32")(functools.partial(_gat, negative_slope))
    return attend(adjacency, dropout, inputs).astype(inputs.features.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)
def _gat(
    negative_slope: float,
    adjacency: Adjacency,
    dropout: EdgeDropout | None,
    inputs: GATInputs,
) -> jax.Array:
    left = adjacency.sources.read(upcast(inputs.left))
    logits = jax.nn.leaky_relu(left + adjacency.targets.read(upcast(inputs.right)), negative_slope)
    messages = adjacency.sources.read(upcast(inputs.features))
    return _weighted_sum(adjacency, logits, messages, inputs.edge_weight, dropout)


def gatv2_by_xla(
    adjacency: Adjacency,
    negative_slope: float,
    dropout: EdgeDropout | None,
    inputs: GATv2Inputs,
) -> jax.Array:
    """Returns attention [nodes, heads, width] in the dtype of `left`."""
    attend = autocast_as("float32")(functools.partial(_gatv2, negative_slope))
    return attend(adjacency, dropout, inputs).astype(inputs.left.dtype)


@functools.partial(jax.checkpoint, static_argnums=0)
def _gatv2(
    negative_slope: float,
    adjacency: Adjacency,
    dropout: EdgeDropout | None,
    inputs: GATv2Inputs,
) -> jax.Array:
    messages = adjacency.sources.read(upcast(inputs.left))
    both = messages + adjacency.targets.read(upcast(inputs.right))
    both = jax.nn.leaky_relu(both, negative_slope)
    logits = (inputs.attention.astype(both.dtype) * both).sum(-1)
    return _weighted_sum(adjacency, logits, messages, inputs.edge_weight, dropout)


def _weighted_sum(
    adjacency: Adjacency,
    logits: jax.Array,
    messages: jax.Array,
    edge_weight: jax.Array | None,
    dropout: EdgeDropout | None,
) -> jax.Array:
    weights = adjacency.targets.softmax(logits)
    if dropout is not None:
        weights = weights * dropout.of_edges(jnp.arange(len(weights))).astype(weights.dtype)
    if edge_weight is not None:
        weights = weights * edge_weight.astype(weights.dtype)[:, None]
    return adjacency.targets.sum(weights[..., None] * messages)
