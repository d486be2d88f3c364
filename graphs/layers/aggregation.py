"""Aggregation of neighbors' features: scaled, reduced and combined in float32, rounded once."""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.fn import Reduce, Reduction
from jmp_train.graphs.kernels import (
    REDUCTIONS,
    EdgeOperation,
    Inputs,
    Scales,
    reduce_messages,
    run_chunked,
    weighted_sender,
    weighted_sum,
)
from jmp_train.graphs.structure import (
    Adjacency,
    CSRAndCSC,
    accumulation_dtype,
    first_rows,
    graph_storage,
    inverse_degrees,
    is_one_precision,
    rows_like,
    upcast,
)
from jmp_train.policies import autocast_as

After = Callable[[Adjacency, jax.Array, jax.Array], jax.Array]


class _Inputs(NamedTuple):
    """The arguments of `aggregate`, under its names."""

    features: jax.Array
    edge_weight: jax.Array | None
    sender_scale: jax.Array | None
    receivers: jax.Array | None
    reduction: Reduction
    after: After | None


def aggregate(
    adjacency: Adjacency,
    features: jax.Array,
    edge_weight: jax.Array | None = None,
    *,
    reduction: Reduction = "sum",
    sender_scale: jax.Array | None = None,
    after: After | None = None,
    receivers: jax.Array | None = None,
) -> jax.Array:
    """Returns an aggregate of each node's neighbors, [receivers, ...] in the features' dtype.

    Everything is computed without rounding, and so without overflow, until the end; the gradient recomputes it.

    Args:
      adjacency: the adjacency of senders and receivers.
      features: floating [senders, ...].
      edge_weight: floating [edges], factors of the messages.
      reduction: "sum", "mean", "max" or "min".
      sender_scale: float32 or higher precision [senders], factors of the features before they are sent.
      after: returns the result, given the adjacency, the receivers' upcast features and the reduced
        messages.
      receivers: floating [receivers, ...], their features; None for the first of the senders' features.
    """
    inputs = _Inputs(features, edge_weight, sender_scale, receivers, reduction, after)
    return AGGREGATION(None, adjacency, inputs)


def _by_xla(adjacency: Adjacency, inputs: _Inputs) -> jax.Array:
    @jax.checkpoint
    def compute(
        adjacency: Adjacency,
        sender_scale: jax.Array | None,
        features: jax.Array,
        edge_weight: jax.Array | None,
        receivers: jax.Array | None,
    ) -> jax.Array:
        rows = upcast(features)
        sent = rows
        if sender_scale is not None:
            sent = rows * rows_like(sender_scale.astype(rows.dtype), rows)
        messages = adjacency.senders.read(sent)
        if edge_weight is not None:
            messages = messages * rows_like(edge_weight.astype(messages.dtype), messages)
        reduced = REDUCTIONS[inputs.reduction](adjacency, messages)
        if inputs.after is None:
            return reduced
        own = first_rows(rows, adjacency.num_receivers) if receivers is None else upcast(receivers)
        return inputs.after(adjacency, own, reduced)

    result = autocast_as("float32")(compute)(
        adjacency,
        inputs.sender_scale,
        graph_storage(inputs.features),
        inputs.edge_weight,
        None if inputs.receivers is None else graph_storage(inputs.receivers),
    )
    return graph_storage(result.astype(inputs.features.dtype))


def _by_chunks(adjacency: Adjacency, inputs: _Inputs) -> jax.Array:
    features, after = inputs.features, inputs.after
    stored = graph_storage(features)
    dtype = features.dtype if after is None else accumulation_dtype(features.dtype)
    if not stored.size:
        result = jnp.zeros((adjacency.num_receivers, *features.shape[1:]), dtype)
    elif inputs.reduction in ("sum", "mean"):
        result = _sum_by_chunks(adjacency, inputs, stored, dtype)
    else:
        result = _extreme_by_chunks(adjacency, inputs, stored).astype(dtype)
    if after is not None:
        own = (
            first_rows(stored, adjacency.num_receivers) if inputs.receivers is None else graph_storage(inputs.receivers)
        )
        finish = autocast_as("float32")(lambda rows, sums: after(adjacency, upcast(rows), sums))
        result = finish(own, result).astype(features.dtype)
    return graph_storage(result)


def _sum_by_chunks(adjacency: Adjacency, inputs: _Inputs, stored: jax.Array, dtype: DTypeLike) -> jax.Array:
    receiver_scale = None
    if inputs.reduction == "mean":
        receiver_scale = inverse_degrees(adjacency.in_degrees, stored)
    scales = Scales(inputs.sender_scale, receiver_scale)

    def add(edges: CSRAndCSC, scales: Scales, data: jax.Array, weights: jax.Array | None) -> jax.Array:
        # Within autocast regions data may be half even if the features were not.
        result_dtype = data.dtype if inputs.after is None else accumulation_dtype(data.dtype)
        return weighted_sum(result_dtype, edges, scales, data, weights)

    rows = stored.reshape(stored.shape[0], 1, -1)
    weights = None if inputs.edge_weight is None else inputs.edge_weight[:, None]
    result = run_chunked(add, adjacency.neighbors, scales, rows, weights)
    return result.reshape(-1, *stored.shape[1:])


def _extreme_by_chunks(adjacency: Adjacency, inputs: _Inputs, stored: jax.Array) -> jax.Array:
    of_edge = () if inputs.edge_weight is None else inputs.edge_weight[:, None, None]
    ends, reductions = Inputs(of_edge, stored.reshape(len(stored), 1, -1)), [Reduce(inputs.reduction, "m", "x")]
    return reduce_messages(weighted_sender, adjacency, ends, reductions)["x"].reshape(-1, *stored.shape[1:])


def _elements_per_edge(inputs: _Inputs) -> int | None:
    """Returns the number of elements per message; None if the reduction does not run in chunks."""
    is_sum = inputs.reduction in ("sum", "mean")
    are_scaled = inputs.sender_scale is not None
    if not is_one_precision(inputs.features, inputs.edge_weight) or (are_scaled and not is_sum):
        return None
    return math.prod(inputs.features.shape[1:])


AGGREGATION = EdgeOperation({"xla": _by_xla, "chunked": _by_chunks}, _elements_per_edge)


def degree_scale(degrees: jax.Array, power: float, features: jax.Array) -> jax.Array | None:
    """Returns a power of degrees, in float32, with 0 counted as 1; None if all are 1.

    Args:
      degrees: int32 [nodes].
      power: 0, -1/2 or -1.
      features: the features to scale.
    """
    if not power:
        return None
    scale = inverse_degrees(degrees, features)
    return jnp.sqrt(scale) if power == -0.5 else scale
