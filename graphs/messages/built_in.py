"""How built-in messages and reductions are computed: wide, fused, and saving nothing for the gradient."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.accumulation import rows_like
from jmp_train.graphs.connections import Connections
from jmp_train.graphs.fn import Message, Reduce
from jmp_train.graphs.implementations import chosen_implementation
from jmp_train.graphs.storage import (
    as_inexact,
    common_dtype,
    graph_storage,
    wide,
    wide_integers,
)
from jmp_train.graphs.streamed_messages import heads_of, is_edge_dot, stream_dot, stream_sum
from jmp_train.policies.autocast import autocast_as

ENDS = {"u": "sender", "v": "receiver", "e": "edge"}


@dataclasses.dataclass(frozen=True)
class Frame:
    """The edges of one type, with the features at their ends.

    Attributes:
      connections: who sends to whom.
      src: features [senders, ...] by name.
      dst: features [receivers, ...] by name.
      data: features [edges, ...] by name.
    """

    connections: Connections
    src: Mapping[str, jax.Array]
    dst: Mapping[str, jax.Array]
    data: Mapping[str, jax.Array]

    def features(self, end: str) -> Mapping[str, jax.Array]:
        """Returns the features of "u", "v" or "e"."""
        return {"u": self.src, "v": self.dst, "e": self.data}[end]


def compute_messages(
    frame: Frame, message: Message, implementation: str | None = None
) -> jax.Array:
    """Returns the message of each edge, [edges, ...] in its features' dtype."""
    operands = _operands(frame, message)
    numbers = math.prod(operands[0].shape[1:]) if is_edge_dot(message, operands) else None
    if _is_streamed(frame, message.name, implementation, numbers):
        return stream_dot(frame.connections, message, operands)
    return _fused(frame, message, operands, lambda messages, connections: messages)


def compute_reduction(
    frame: Frame, message: Message, reduce: Reduce, implementation: str | None = None
) -> jax.Array:
    """Returns what the receivers make of their messages, [receivers, ...] in the features' dtype.

    What sums need per edge and feature is not stored: compilers for GPUs fuse reads, arithmetic and
    the addition, and the gradient computes the messages anew.
    """
    if reduce.message != message.out:
        raise ValueError(
            f"{message.name} makes the message {message.out!r}, but {reduce.reduction} wants "
            f"{reduce.message!r}"
        )
    operands = _operands(frame, message)
    heads = heads_of(message, reduce.reduction, operands)
    numbers = None if heads is None else max(math.prod(x.shape[1:]) for x in operands)
    if heads is not None and _is_streamed(frame, message.name, implementation, numbers):
        return stream_sum(frame.connections, message, reduce.reduction, operands, heads)
    return _fused(
        frame,
        message,
        operands,
        lambda messages, connections: REDUCTIONS[reduce.reduction](connections, messages),
    )


def reduce_messages(connections: Connections, messages: jax.Array, reduction: str) -> jax.Array:
    """Returns what the receivers make of messages that are there, [receivers, ...] in their dtype."""
    return in_float32(lambda x: REDUCTIONS[reduction](connections, wide(x)), messages)


def _is_streamed(
    frame: Frame, name: str, implementation: str | None, numbers_per_edge: int | None
) -> bool:
    """Whether messages of so many numbers are streamed; None for those that never are."""
    if numbers_per_edge is not None:
        chosen = chosen_implementation(implementation, frame.connections, numbers_per_edge)
        return chosen == "streaming"
    if implementation == "streaming":
        raise ValueError(
            f'implementation="streaming" adds copy_u and u_mul_e with one weight for a head, and makes '
            f"u_dot_v of floats; this is {name} of other shapes or dtypes, or with another reduction"
        )
    chosen_implementation(implementation, frame.connections, 0)
    return False


def _operands(frame: Frame, message: Message) -> list[jax.Array]:
    operands = [_operand(frame, message, end, field) for end, field in message.operands]
    _check_shapes(message, operands)
    return operands


def _fused(
    frame: Frame,
    message: Message,
    operands: Sequence[jax.Array],
    finish: Callable[[jax.Array, Connections], jax.Array],
) -> jax.Array:
    ends = [end for end, _ in message.operands]

    @jax.checkpoint
    def compute(operands: Sequence[jax.Array], connections: Connections) -> jax.Array:
        reads = [_read(connections, end, wide(x)) for end, x in zip(ends, operands, strict=True)]
        return finish(_operate(message.operation, reads, connections), connections)

    return in_float32(lambda *operands: compute(operands, frame.connections), *operands)


def in_float32(compute: Callable[..., jax.Array], *operands: jax.Array) -> jax.Array:
    """Returns what is computed of stored operands, in float32, stored in their common dtype.

    Args:
      compute: a function of the operands, which it has to widen.
      *operands: features in the dtypes that they are stored in.
    """
    stored = [graph_storage(operand) for operand in operands]
    result = autocast_as("float32")(compute)(*stored)
    return graph_storage(result.astype(_result_dtype(operands, result.dtype)))


def _result_dtype(operands: Sequence[jax.Array], computed: Any) -> Any:
    """Returns the features' common dtype; of integers what was computed: wider ones, or floats."""
    common = common_dtype(*(operand.dtype for operand in operands))
    return common if jnp.issubdtype(common, jnp.inexact) else computed


def _operand(frame: Frame, message: Message, end: str, field: str) -> jax.Array:
    features = frame.features(end)
    if field not in features:
        known = ", ".join(map(repr, features)) or "none"
        raise ValueError(f"{message.name}: no {ENDS[end]} feature {field!r}; there are: {known}")
    return features[field]


def _check_shapes(message: Message, operands: Sequence[jax.Array]) -> None:
    if len(operands) == 1:
        return
    shapes = [_aligned_shape(x.shape[1:], operands) for x in operands]
    if message.operation == "dot" and len({shape[-1:] for shape in shapes}) == 2:
        fault = "the last axes differ"
    else:
        try:
            jnp.broadcast_shapes(*shapes)
            return
        except ValueError:
            fault = "they do not broadcast"
    (left_end, left), (right_end, right) = message.operands
    raise ValueError(
        f"{message.name}: feature {left!r} of the {ENDS[left_end]} and {right!r} of the "
        f"{ENDS[right_end]} have shapes {operands[0].shape[1:]} and {operands[1].shape[1:]} after "
        f"their first axes: {fault}"
    )


def _aligned_shape(shape: tuple[int, ...], others: Sequence[jax.Array]) -> tuple[int, ...]:
    """Returns a feature's shape with the axes that it lacks, in front."""
    rank = max(other.ndim - 1 for other in others)
    return (1,) * (rank - len(shape)) + shape


def _read(connections: Connections, end: str, operand: jax.Array) -> jax.Array:
    if end == "e":
        return operand
    return (connections.sources if end == "u" else connections.targets).read(operand)


def _operate(operation: str, reads: Sequence[jax.Array], connections: Connections) -> jax.Array:
    if operation == "copy":
        return reads[0]
    left, right = (x.reshape(x.shape[0], *_aligned_shape(x.shape[1:], reads)) for x in reads)
    dtype = common_dtype(left.dtype, right.dtype)
    left, right = (wide_integers(x.astype(dtype)) for x in (left, right))
    if operation == "dot":
        return left * right if left.ndim == 1 else (left * right).sum(-1, keepdims=True)
    if operation == "div":  # by 1 for padding edges, or their gradients were NaN
        is_counted = rows_like(connections.targets.is_counted, right)
        right = jnp.where(is_counted, right, jnp.ones_like(right))
    return {"add": jnp.add, "sub": jnp.subtract, "mul": jnp.multiply, "div": jnp.divide}[operation](
        left, right
    )


def _sum(connections: Connections, messages: jax.Array) -> jax.Array:
    return connections.targets.sum(wide_integers(messages))


def _mean(connections: Connections, messages: jax.Array) -> jax.Array:
    return connections.targets.mean(as_inexact(messages))


def _max(connections: Connections, messages: jax.Array) -> jax.Array:
    return _zero_without_edges(connections, connections.targets.max(messages))


def _min(connections: Connections, messages: jax.Array) -> jax.Array:
    return _zero_without_edges(connections, connections.targets.min(messages))


def _zero_without_edges(connections: Connections, result: jax.Array) -> jax.Array:
    is_reached = rows_like(connections.targets.degrees > 0, result)
    return jnp.where(is_reached, result, jnp.zeros_like(result))


REDUCTIONS: dict[str, Callable[[Connections, jax.Array], jax.Array]] = {
    "sum": _sum,
    "mean": _mean,
    "max": _max,
    "min": _min,
}
