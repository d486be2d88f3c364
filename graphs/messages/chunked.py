"""Which built-in messages and reductions are streamed: weighted sums of senders, and products of both ends."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.connections import Connections
from jmp_train.graphs.edge_products import Scales, edge_dot, weighted_sum
from jmp_train.graphs.fn import Message
from jmp_train.graphs.storage import common_dtype, graph_storage, wide_dtype
from jmp_train.graphs.streaming import vary_alike
from jmp_train.policies.autocast_given import as_given


def heads_of(message: Message, reduction: str, operands: Sequence[jax.Array]) -> int | None:
    """Returns how many heads a weighted sum of senders' rows has; None where it is none.

    The axes of the senders' features that the edges' have too are heads: an edge has one weight for each.

    Args:
      message: which.
      reduction: "sum", "mean", "max" or "min".
      operands: its features.
    """
    ends = "".join(end for end, _ in message.operands)
    is_sum = (message.operation, ends) in (("copy", "u"), ("mul", "ue"), ("mul", "eu"))
    if not is_sum or reduction not in ("sum", "mean") or not is_one_precision(*operands):
        return None
    if ends == "u":
        return 1
    rows, weights = operands if ends == "ue" else reversed(operands)
    shape = (1,) * (rows.ndim - weights.ndim) + weights.shape[1:]
    count = max((axis + 1 for axis, length in enumerate(shape) if length != 1), default=0)
    is_prefix = rows.ndim >= weights.ndim and shape[:count] == rows.shape[1 : count + 1]
    return math.prod(shape[:count]) if is_prefix else None


def stream_sum(
    connections: Connections,
    message: Message,
    reduction: str,
    operands: Sequence[jax.Array],
    heads: int,
) -> jax.Array:
    """Returns what the receivers make of their messages, [receivers, ...] in the operands' common dtype.

    Args:
      connections: who sends to whom, with `neighbors`.
      message: which.
      reduction: "sum" or "mean".
      operands: its features.
      heads: see `heads_of`.
    """
    by_end = {end: graph_storage(x) for (end, _), x in zip(message.operands, operands, strict=True)}
    rows, weights = by_end["u"], by_end.get("e")
    scales = Scales(targets=inverse(connections.in_degrees, rows) if reduction == "mean" else None)
    if rows.size == 0:
        dtype = common_dtype(*(operand.dtype for operand in operands))
        return jnp.zeros((connections.num_targets, *rows.shape[1:]), dtype)
    result = as_given(functools.partial(weighted_sum, None))(
        *vary_alike(
            (
                connections.neighbors,
                scales,
                rows.reshape(rows.shape[0], heads, -1),
                None if weights is None else weights.reshape(-1, heads),
            )
        )
    )
    return graph_storage(result).reshape(-1, *rows.shape[1:])


def is_edge_dot(message: Message, operands: Sequence[jax.Array]) -> bool:
    """Whether a message is the product of rows at both ends, of one shape.

    Args:
      message: which.
      operands: its features.
    """
    ends = {end for end, _ in message.operands}
    return (
        message.operation == "dot"
        and ends == {"u", "v"}
        and operands[0].ndim > 1
        and operands[0].shape[1:] == operands[1].shape[1:]
        and is_one_precision(*operands)
    )


def stream_dot(
    connections: Connections, message: Message, operands: Sequence[jax.Array]
) -> jax.Array:
    """Returns the products [edges, ..., 1] of rows at both ends, in the operands' common dtype.

    Args:
      connections: who sends to whom, with `neighbors`.
      message: which.
      operands: its features.
    """
    by_end = {end: graph_storage(x) for (end, _), x in zip(message.operands, operands, strict=True)}
    _, *inner, width = operands[0].shape
    if not all(operand.size for operand in operands):
        dtype = common_dtype(*(operand.dtype for operand in operands))
        return jnp.zeros((connections.num_edges, *inner, 1), dtype)
    rows = [by_end[end].reshape(-1, math.prod(inner), width) for end in "uv"]
    result = as_given(edge_dot)(*vary_alike((connections.neighbors, Scales(), *rows)))
    return graph_storage(result).reshape(-1, *inner, 1)


def inverse(degrees: jax.Array, features: jax.Array) -> jax.Array:
    """Returns 1 over degrees, those of 0 counted as 1, in the dtype in which features are computed."""
    return 1 / jnp.maximum(degrees, 1).astype(wide_dtype(features.dtype))


def is_one_precision(*operands: jax.Array | None) -> bool:
    """Whether operands, None aside, are floats that are computed in one dtype."""
    dtypes = [x.dtype for x in operands if x is not None]
    are_floats = all(jnp.issubdtype(dtype, jnp.floating) for dtype in dtypes)
    return are_floats and len({wide_dtype(dtype) for dtype in dtypes}) == 1
