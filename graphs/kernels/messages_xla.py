"""Built-in messages and reductions with arrays of all edges, which XLA may fuse; gradients recompute them.

Compilers for GPUs fuse reads, arithmetic and the addition, so that no values per edge and feature are stored.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.graphs.fn import Message, Operation, Reduce, Reduction
from jmp_train.graphs.structure import (
    Adjacency,
    as_inexact,
    common_dtype,
    computed_once,
    root_or_zero,
    rows_like,
    upcast,
    upcast_integers,
)

Operands = Sequence[jax.Array]
Reductions = tuple[Reduce, ...]


@dataclasses.dataclass(frozen=True)
class CheckedMessage:
    """A built-in message whose features exist and fit.

    Attributes:
      message: the message.
      shape: shape of one edge's message.
      dtype: dtype of the computation if its features are floats of one precision; otherwise None.
    """

    message: Message
    shape: tuple[int, ...]
    dtype: np.dtype | None


def messages_by_xla(adjacency: Adjacency, message: CheckedMessage, *operands: jax.Array) -> jax.Array:
    """Returns the message of each edge, [edges, ...] in at least float32.

    Args:
      adjacency: the edges.
      message: the built-in message.
      *operands: its features in their stored dtypes.
    """
    return _messages(message.message, operands, adjacency)


def reductions_by_xla(
    adjacency: Adjacency, message: CheckedMessage, reductions: Reductions, *operands: jax.Array
) -> dict[str, jax.Array]:
    """Returns the reductions of the messages, [receivers, ...] by name in at least float32.

    Args:
      adjacency: the edges.
      message: the built-in message.
      reductions: the reductions of this message.
      *operands: the message's features in their stored dtypes.
    """
    return _reductions(message.message, reductions, operands, adjacency)


def reduce_rows(adjacency: Adjacency, reductions: Reductions, messages: jax.Array) -> dict[str, jax.Array]:
    """Returns the reductions of messages [edges, ...], upcast, [receivers, ...] by name.

    Args:
      adjacency: the edges.
      reductions: the reductions.
      messages: the upcast messages.
    """
    return {
        reduce.out: adjacency.receivers.softmax_sum(as_inexact(messages), reduce.temperature)
        if reduce.reduction == "softmax"
        else REDUCTIONS[reduce.reduction](adjacency, messages)
        for reduce in reductions
    }


def once_if_compared(reductions: Reductions, messages: jax.Array) -> jax.Array:
    """Returns messages that reductions may compare with their extremes; see `computed_once`."""
    names = {reduce.reduction for reduce in reductions}
    if names & {"argmax", "argmin"}:
        return jax.lax.optimization_barrier(messages)
    return computed_once(messages) if names & {"max", "min"} else messages


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def _reductions(
    message: Message, reductions: Reductions, operands: Operands, adjacency: Adjacency
) -> dict[str, jax.Array]:
    messages = _computed(message, operands, adjacency)
    if message.operation == "dot":  # the others round once, and so alike wherever they are computed
        messages = once_if_compared(reductions, messages)
    return reduce_rows(adjacency, reductions, messages)


@functools.partial(jax.checkpoint, static_argnums=0)
def _messages(message: Message, operands: Operands, adjacency: Adjacency) -> jax.Array:
    return _computed(message, operands, adjacency)


def _computed(message: Message, operands: Operands, adjacency: Adjacency) -> jax.Array:
    """Returns the messages [edges, ...] in the dtype in which they are computed."""
    rows = [upcast(operand) for operand in operands]
    ends = {"u": adjacency.senders, "v": adjacency.receivers}
    reads = [x if end == "e" else ends[end].read(x) for (end, _), x in zip(message.operands, rows, strict=True)]
    if len(reads) == 1:
        return reads[0]
    left, right = reads
    return _combined(message.operation, left, right, adjacency)


def _combined(operation: Operation, left: jax.Array, right: jax.Array, adjacency: Adjacency) -> jax.Array:
    """Returns the result of an operation for both operands' rows [edges, ...]."""
    if operation == "div":  # by 1 for padding edges, or their gradients were NaN
        is_counted = rows_like(adjacency.receivers.is_counted, right)
        right = jnp.where(is_counted, right, jnp.ones_like(right))
    return combined_rows(operation, left, right)


def combined_rows(operation: Operation, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the result of an operation for upcast rows [rows, ...], with axes inserted after the first one.

    Args:
      operation: an operation other than "copy".
      left: rows of the left operand.
      right: rows of the right operand.
    """
    dtype = common_dtype(left.dtype, right.dtype)
    rank = max(left.ndim, right.ndim)
    left = left.reshape(left.shape[0], *[1] * (rank - left.ndim), *left.shape[1:])
    right = right.reshape(right.shape[0], *[1] * (rank - right.ndim), *right.shape[1:])
    if operation == "sub" and dtype.kind == "u" and dtype.itemsize < 4:
        dtype = np.dtype(np.int32)  # the difference may be negative
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
