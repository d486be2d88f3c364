"""Built-in messages and reductions with arrays of all edges, which XLA may fuse; gradients recompute them.

Compilers for GPUs fuse reads, arithmetic and the addition, so that what sums need for each edge and feature
is not stored.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Message, Operation, Reduce, Reduction
from jmp_train.graphs.structure import (
    Adjacency,
    as_inexact,
    common_dtype,
    in_float32,
    root_or_zero,
    rows_like,
    upcast,
    upcast_integers,
)

Operands = Sequence[jax.Array]
Reductions = tuple[Reduce, ...]


def messages_by_xla(adjacency: Adjacency, message: Message, operands: Operands) -> jax.Array:
    """Returns the message of each edge, [edges, ...] in the operands' common dtype.

    Args:
      adjacency: who sends to whom.
      message: which.
      operands: its features.
    """
    return in_float32(lambda *operands: _messages(message, operands, adjacency), *operands)


def reductions_by_xla(
    adjacency: Adjacency, message: Message, reductions: Reductions, operands: Operands
) -> dict[str, jax.Array]:
    """Returns what the receivers make of their messages, [receivers, ...] by name in the operands' common dtype.

    Args:
      adjacency: who sends to whom.
      message: which.
      reductions: which, all of this message.
      operands: the message's features.
    """
    return in_float32(lambda *operands: _reductions(message, reductions, operands, adjacency), *operands)


def reduce_rows(adjacency: Adjacency, reductions: Reductions, messages: jax.Array) -> dict[str, jax.Array]:
    """Returns what the receivers make of messages [edges, ...], upcast, [receivers, ...] by name.

    Args:
      adjacency: who sends to whom.
      reductions: which.
      messages: upcast.
    """
    return {
        reduce.out: adjacency.receivers.softmax_sum(as_inexact(messages), reduce.temperature)
        if reduce.reduction == "softmax"
        else REDUCTIONS[reduce.reduction](adjacency, messages)
        for reduce in reductions
    }


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _reductions(
    message: Message, reductions: Reductions, operands: Operands, adjacency: Adjacency
) -> dict[str, jax.Array]:
    return reduce_rows(adjacency, reductions, _computed(message, operands, adjacency))


@functools.partial(jax.checkpoint, static_argnums=0)
def _messages(message: Message, operands: Operands, adjacency: Adjacency) -> jax.Array:
    return _computed(message, operands, adjacency)


def _computed(message: Message, operands: Operands, adjacency: Adjacency) -> jax.Array:
    """Returns the messages [edges, ...] in the dtype in which they are computed."""
    reads = []
    for (end, _), operand in zip(message.operands, operands, strict=True):
        rows = upcast(operand)
        if end != "e":
            rows = (adjacency.senders if end == "u" else adjacency.receivers).read(rows)
        reads.append(rows)
    if len(reads) == 1:
        return reads[0]
    left, right = reads
    return _combined(message.operation, left, right, adjacency)


def _combined(operation: Operation, left: jax.Array, right: jax.Array, adjacency: Adjacency) -> jax.Array:
    """Returns what an operation makes of both operands' rows [edges, ...]."""
    if operation == "div":  # by 1 for padding edges, or their gradients were NaN
        is_counted = rows_like(adjacency.receivers.is_counted, right)
        right = jnp.where(is_counted, right, jnp.ones_like(right))
    return combined_rows(operation, left, right)


def combined_rows(operation: Operation, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns what an operation makes of rows [rows, ...], upcast, with axes inserted after the first one.

    Args:
      operation: not "copy".
      left: of one operand.
      right: of the other one.
    """
    dtype = common_dtype(left.dtype, right.dtype)
    rank = max(left.ndim, right.ndim)
    left = left.reshape(left.shape[0], *[1] * (rank - left.ndim), *left.shape[1:])
    right = right.reshape(right.shape[0], *[1] * (rank - right.ndim), *right.shape[1:])
    left, right = upcast_integers(left.astype(dtype)), upcast_integers(right.astype(dtype))
    if operation == "dot":
        return left * right if left.ndim == 1 else (left * right).sum(-1, keepdims=True)
    return {"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide}[operation](left, right)


def _sum(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return adjacency.receivers.sum(upcast_integers(messages))


def _mean(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return adjacency.receivers.mean(as_inexact(messages))


def _max(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return _zero_without_edges(adjacency, adjacency.receivers.max(messages))


def _min(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return _zero_without_edges(adjacency, adjacency.receivers.min(messages))


def _var(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return adjacency.receivers.moments(as_inexact(messages))[1]


def _std(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return root_or_zero(_var(adjacency, messages))


def _argmax(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return adjacency.receivers.argmax(messages)


def _argmin(adjacency: Adjacency, messages: jax.Array) -> jax.Array:
    return adjacency.receivers.argmin(messages)


def _zero_without_edges(adjacency: Adjacency, result: jax.Array) -> jax.Array:
    is_reached = rows_like(adjacency.receivers.degrees > 0, result)
    return jnp.where(is_reached, result, jnp.zeros_like(result))


REDUCTIONS: dict[Reduction, Callable[[Adjacency, jax.Array], jax.Array]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "min": _min,
    "var": _var,
    "std": _std,
    "argmax": _argmax,
    "argmin": _argmin,
}
