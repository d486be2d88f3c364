"""Chunked kernels of built-in messages: weighted sums of senders, and products of both ends."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message, Reduction
from jmp_train.graphs.kernels import Scales, edge_dot, run_chunked, weighted_sum
from jmp_train.graphs.structure import (
    Adjacency,
    common_dtype,
    graph_storage,
    inverse_degrees,
    is_one_precision,
)


def elements_of_sum(message: Message, reduction: Reduction, operands: Sequence[jax.Array]) -> int | None:
    """Returns of how many elements a message of a weighted sum of senders is; None of other reductions.

    Args:
      message: which.
      reduction: "sum", "mean", "max" or "min".
      operands: its features.
    """
    if reduction not in ("sum", "mean") or _heads(message, operands) is None:
        return None
    return max([math.prod(x.shape[1:]) for x in operands])


def _heads(message: Message, operands: Sequence[jax.Array]) -> int | None:
    """Returns how many heads a sum of senders' rows has that edges weight; None where it is not such a sum.

    The axes of the senders' features that the edges' have too are heads: an edge has one weight for each.
    """
    ends = "".join([end for end, _ in message.operands])
    is_sum = (message.operation, ends) in (("copy", "u"), ("mul", "ue"), ("mul", "eu"))
    if not is_sum or not is_one_precision(*operands):
        return None
    if ends == "u":
        return 1
    rows, weights = operands if ends == "ue" else reversed(operands)
    shape = (1,) * (rows.ndim - weights.ndim) + weights.shape[1:]
    count = max((axis + 1 for axis, length in enumerate(shape) if length != 1), default=0)
    is_prefix = rows.ndim >= weights.ndim and shape[:count] == rows.shape[1 : count + 1]
    return math.prod(shape[:count]) if is_prefix else None


def chunked_sum(
    adjacency: Adjacency,
    message: Message,
    reduction: Reduction,
    operands: Sequence[jax.Array],
) -> jax.Array:
    """Returns what the receivers make of their messages, [receivers, ...] in the operands' common dtype.

    Args:
      adjacency: who sends to whom, with `neighbors`.
      message: which.
      reduction: "sum" or "mean".
      operands: its features.
    """
    heads = _heads(message, operands)
    by_end = {end: graph_storage(x) for (end, _), x in zip(message.operands, operands, strict=True)}
    rows, weights = by_end["u"], by_end.get("e")
    scales = Scales(receivers=inverse_degrees(adjacency.in_degrees, rows) if reduction == "mean" else None)
    if rows.size == 0:
        dtype = common_dtype(*(operand.dtype for operand in operands))
        return jnp.zeros((adjacency.num_receivers, *rows.shape[1:]), dtype)
    result = run_chunked(
        functools.partial(weighted_sum, None),
        adjacency.neighbors,
        scales,
        rows.reshape(rows.shape[0], heads, -1),
        None if weights is None else weights.reshape(-1, heads),
    )
    return graph_storage(result).reshape(-1, *rows.shape[1:])


def elements_of_dot(message: Message, operands: Sequence[jax.Array]) -> int | None:
    """Returns how many elements are multiplied for an edge; None where it is not a product of rows of one shape.

    Args:
      message: which.
      operands: its features.
    """
    ends = {end for end, _ in message.operands}
    if message.operation != "dot" or ends != {"u", "v"}:
        return None
    left, right = operands
    is_one_shape = left.ndim > 1 and left.shape[1:] == right.shape[1:]
    return math.prod(left.shape[1:]) if is_one_shape and is_one_precision(left, right) else None


def chunked_dot(adjacency: Adjacency, message: Message, operands: Sequence[jax.Array]) -> jax.Array:
    """Returns the products [edges, ..., 1] of rows at both ends, in the operands' common dtype.

    Args:
      adjacency: who sends to whom, with `neighbors`.
      message: which.
      operands: its features.
    """
    by_end = {end: graph_storage(x) for (end, _), x in zip(message.operands, operands, strict=True)}
    _, *inner, width = operands[0].shape
    if not all(operand.size for operand in operands):
        dtype = common_dtype(*(operand.dtype for operand in operands))
        return jnp.zeros((adjacency.num_edges, *inner, 1), dtype)
    rows = [by_end[end].reshape(-1, math.prod(inner), width) for end in "uv"]
    result = run_chunked(edge_dot, adjacency.neighbors, Scales(), *rows)
    return graph_storage(result).reshape(-1, *inner, 1)
