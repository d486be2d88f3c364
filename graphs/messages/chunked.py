"""Chunked kernels of built-in messages: reductions of weighted senders, and products of both ends."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message
from jmp_train.graphs.kernels import (
    Reductions,
    Scales,
    chunked_moments,
    chunked_softmax_sum,
    edge_dot,
    run_chunked,
    weighted_sum,
)
from jmp_train.graphs.structure import (
    Adjacency,
    accumulation_dtype,
    common_dtype,
    graph_storage,
    in_float32,
    inverse_degrees,
    is_one_precision,
    root_or_zero,
)

CHUNKED_REDUCTIONS = ("sum", "mean", "var", "std", "softmax")


def elements_of_reductions(message: Message, reductions: Reductions, operands: Sequence[jax.Array]) -> int | None:
    """Returns of how many elements a message of weighted senders is; None of other messages or reductions.

    Args:
      message: which.
      reductions: which.
      operands: the message's features.
    """
    are_known = all(reduce.reduction in CHUNKED_REDUCTIONS for reduce in reductions)
    if not are_known or _heads(message, operands) is None:
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


def chunked_reductions(
    adjacency: Adjacency,
    message: Message,
    reductions: Reductions,
    operands: Sequence[jax.Array],
) -> dict[str, jax.Array]:
    """Returns what the receivers make of their messages, [receivers, ...] by name in the operands' common dtype.

    Args:
      adjacency: who sends to whom, with `neighbors`.
      message: which.
      reductions: which, of `CHUNKED_REDUCTIONS`.
      operands: the message's features.
    """
    heads = _heads(message, operands)
    ends = [end for end, _ in message.operands]
    rows = operands[ends.index("u")]
    names = [reduce.reduction for reduce in reductions]
    if rows.size == 0:
        dtype = common_dtype(*(operand.dtype for operand in operands))
        zeros = jnp.zeros((adjacency.num_receivers, *rows.shape[1:]), dtype)
        return {reduce.out: zeros for reduce in reductions}

    def compute(*operands: jax.Array) -> dict[str, jax.Array]:
        by_end = dict(zip(ends, operands, strict=True))
        data, weights = by_end["u"], by_end.get("e")
        data = data.reshape(data.shape[0], heads, -1)
        weights = None if weights is None else weights.reshape(-1, heads)
        found = {}
        if "var" in names or "std" in names:  # the mean is at hand then
            found["mean"], found["var"] = chunked_moments(adjacency, data, weights)
            found["std"] = root_or_zero(found["var"])
        for name in {"sum", "mean"}.intersection(names).difference(found):
            scales = Scales(receivers=inverse_degrees(adjacency.in_degrees, data) if name == "mean" else None)
            dtype = accumulation_dtype(data.dtype)
            add = functools.partial(weighted_sum, dtype)
            found[name] = run_chunked(add, adjacency.neighbors, scales, data, weights)
        results = {}
        for reduce in reductions:
            if reduce.reduction == "softmax":
                result = chunked_softmax_sum(reduce.temperature, adjacency, data, weights)
            else:
                result = found[reduce.reduction]
            results[reduce.out] = result.reshape(-1, *rows.shape[1:])
        return results

    return in_float32(compute, *operands)


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
