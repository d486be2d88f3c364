"""GATv2's attention, and that of products.

For an edge from u to v, GATv2's logits are the sums over the width of `attention * leaky_relu(left[u] + right[v])`.
Those of products are `scale q[v] . (k[u] + W f)`, and the value of an edge is `z[u] + W f`, where `f` are the features
of the edge and `W` is a matrix. The kernel does not need `W`: `q[v] . W f` is the product of `f` and a row of v, the
edge's query, and the caller multiplies the weighted sum of `f` by `W`. The logarithms of the softmaxes' sums, which
have gradients, allow joining several softmaxes of one node.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.attention import Add, Attention, AttentionInputs
from jmp_train.graphs.kernels.chunks import sum_of_rows


@dataclasses.dataclass(frozen=True)
class GATv2(Attention):
    """The attention of GATv2: senders, receivers and what is shared are [..., heads, width]."""

    negative_slope: float

    def __call__(self, rows: AttentionInputs, add: Add = sum_of_rows) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits and messages."""
        both = jax.nn.leaky_relu(rows.senders + rows.receivers, self.negative_slope)
        return add(rows.shared.astype(both.dtype) * both), [rows.senders]


@dataclasses.dataclass(frozen=True)
class DotAttention(Attention):
    """The attention of products; senders are (key, value), receivers (query, edge's query or None)."""

    scale: float
    is_exact = True

    def __call__(self, rows: AttentionInputs, add: Add = sum_of_rows) -> tuple[jax.Array, list[jax.Array]]:
        """Returns logits and messages."""
        (key, value), (query, edge_query), features = rows[:3]
        logits, messages = add(key * query), [value]
        if features is not None:
            features = features[..., None, :].astype(value.dtype)
            messages.append(jnp.broadcast_to(features, (*logits.shape, features.shape[-1])))
            logits = logits if edge_query is None else logits + (edge_query * features).sum(-1)
        return self.scale * logits, messages
