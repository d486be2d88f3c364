"""What layers make of a node's neighbours: scaled, reduced and combined in float32, rounded once."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.accumulation import first_rows, rows_like
from jmp_train.graphs.connections import Connections
from jmp_train.graphs.edge_products import Scales, weighted_sum
from jmp_train.graphs.implementations import chosen_implementation
from jmp_train.graphs.messages import REDUCTIONS
from jmp_train.graphs.storage import graph_storage, wide, wide_dtype
from jmp_train.graphs.streamed_messages import inverse, is_one_precision
from jmp_train.graphs.streaming import vary_alike
from jmp_train.policies.autocast import autocast_as
from jmp_train.policies.autocast_given import as_given

After = Callable[[Connections, jax.Array, jax.Array], jax.Array]


def aggregate(
    connections: Connections,
    features: jax.Array,
    edge_weight: jax.Array | None = None,
    *,
    reduction: str = "sum",
    source_scale: jax.Array | None = None,
    after: After | None = None,
    targets: jax.Array | None = None,
) -> jax.Array:
    """Returns what nodes make of the nodes that send to them, [targets, ...] in the features' dtype.

    Nothing is rounded, and so nothing overflows, before the end; the gradient computes all anew.

    Args:
      connections: who sends to whom.
      features: floating [sources, ...].
      edge_weight: floating [edges], which multiplies the messages.
      reduction: "sum", "mean", "max" or "min".
      source_scale: wide [sources], by which features are multiplied before they are sent.
      after: a function of the connections, the targets' wide features and the reduced messages to the result.
      targets: floating [targets, ...], their features; None for the first of the sources'.
    """
    numbers = math.prod(features.shape[1:])
    is_sum = reduction in ("sum", "mean") and is_one_precision(features, edge_weight)
    if is_sum and chosen_implementation(None, connections, numbers) == "streaming":
        target_scale = inverse(connections.in_degrees, features) if reduction == "mean" else None
        scales = Scales(source_scale, target_scale)
        return _stream(connections, features, edge_weight, scales, after, targets)

    @jax.checkpoint
    def compute(
        connections: Connections,
        source_scale: jax.Array | None,
        features: jax.Array,
        edge_weight: jax.Array | None,
        targets: jax.Array | None,
    ) -> jax.Array:
        rows = wide(features)
        sent = rows
        if source_scale is not None:
            sent = rows * rows_like(source_scale.astype(rows.dtype), rows)
        messages = connections.sources.read(sent)
        if edge_weight is not None:
            messages = messages * rows_like(edge_weight.astype(messages.dtype), messages)
        reduced = REDUCTIONS[reduction](connections, messages)
        if after is None:
            return reduced
        own = first_rows(rows, connections.num_targets) if targets is None else wide(targets)
        return after(connections, own, reduced)

    result = autocast_as("float32")(compute)(
        connections,
        source_scale,
        graph_storage(features),
        edge_weight,
        None if targets is None else graph_storage(targets),
    )
    return graph_storage(result.astype(features.dtype))


def _stream(
    connections: Connections,
    features: jax.Array,
    edge_weight: jax.Array | None,
    scales: Scales,
    after: After | None,
    targets: jax.Array | None,
) -> jax.Array:
    def add(edges: Any, scales: Scales, data: jax.Array, weights: jax.Array | None) -> jax.Array:
        dtype = data.dtype if after is None else wide_dtype(data.dtype)
        return weighted_sum(dtype, edges, scales, data, weights)

    stored = graph_storage(features)
    if stored.size:
        rows = stored.reshape(stored.shape[0], 1, -1)
        weights = None if edge_weight is None else edge_weight[:, None]
        inputs = vary_alike((connections.neighbors, scales, rows, weights))
        result = as_given(add)(*inputs).reshape(-1, *features.shape[1:])
    else:
        dtype = features.dtype if after is None else wide_dtype(features.dtype)
        result = jnp.zeros((connections.num_targets, *features.shape[1:]), dtype)
    if after is not None:
        own = (
            first_rows(stored, connections.num_targets)
            if targets is None
            else graph_storage(targets)
        )
        finish = autocast_as("float32")(lambda rows, sums: after(connections, wide(rows), sums))
        result = finish(own, result).astype(features.dtype)
    return graph_storage(result)


def degree_scale(degrees: jax.Array, power: float, features: jax.Array) -> jax.Array | None:
    """Returns a power of degrees, wide, those of 0 counted as 1; None where all are 1.

    Args:
      degrees: int32 [nodes].
      power: 0, -1/2 or -1.
      features: what they are to scale.
    """
    if not power:
        return None
    scale = inverse(degrees, features)
    return jnp.sqrt(scale) if power == -0.5 else scale
