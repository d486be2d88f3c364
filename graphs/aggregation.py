"""What layers make of a node's neighbours: scaled, reduced and combined in float32, rounded once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jmp_train.graphs.accumulation import rows_like
from jmp_train.graphs.connections import Connections
from jmp_train.graphs.messages import REDUCTIONS
from jmp_train.graphs.storage import graph_storage, wide
from jmp_train.policies.autocast import autocast_as

Before = Callable[[Connections, jax.Array], jax.Array]
After = Callable[[Connections, jax.Array, jax.Array], jax.Array]


def aggregate(
    connections: Connections,
    features: jax.Array,
    edge_weight: jax.Array | None = None,
    *,
    reduction: str = "sum",
    before: Before | None = None,
    after: After | None = None,
) -> jax.Array:
    """Returns what nodes make of the nodes that send to them, [nodes, ...] in the features' dtype.

    Nothing is rounded, and so nothing overflows, before the end; the gradient computes all anew.

    Args:
      connections: who sends to whom.
      features: floating [nodes, ...].
      edge_weight: floating [edges], which multiplies the messages.
      reduction: "sum", "mean", "max" or "min".
      before: a function of the connections and the wide features to what is sent.
      after: a function of the connections, the wide features and the reduced messages to the result.
    """

    @jax.checkpoint
    def compute(
        connections: Connections, features: jax.Array, edge_weight: jax.Array | None
    ) -> jax.Array:
        rows = wide(features)
        messages = connections.sources.read(rows if before is None else before(connections, rows))
        if edge_weight is not None:
            messages = messages * rows_like(edge_weight.astype(messages.dtype), messages)
        reduced = REDUCTIONS[reduction](connections, messages)
        return reduced if after is None else after(connections, rows, reduced)

    result = autocast_as("float32")(compute)(connections, graph_storage(features), edge_weight)
    return graph_storage(result.astype(features.dtype))


def scaled_by_degree(rows: jax.Array, degrees: jax.Array, power: float) -> jax.Array:
    """Returns rows times a power of their degrees, those of 0 counted as 1.

    Args:
      rows: wide [nodes, ...].
      degrees: int32 [nodes].
      power: 0, -1/2 or -1.
    """
    if not power:
        return rows
    sizes = jnp.maximum(degrees, 1).astype(rows.dtype)
    return rows / rows_like(jnp.sqrt(sizes) if power == -0.5 else sizes, rows)
