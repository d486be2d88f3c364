"""Built-in messages and reductions: checks of their features, and the kernels that compute them."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import End, Message
from jmp_train.graphs.kernels import (
    EdgeOperation,
    Reductions,
    messages_by_xla,
    reduce_rows,
    reductions_by_xla,
)
from jmp_train.graphs.messages.chunked import (
    chunked_dot,
    chunked_reductions,
    elements_of_dot,
    elements_of_reductions,
)
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.structure import Adjacency, in_float32, upcast

ENDS: dict[End, str] = {"u": "sender", "v": "receiver", "e": "edge"}

MESSAGES = EdgeOperation(
    {"xla": messages_by_xla, "chunked": chunked_dot},
    elements_of_dot,
    "makes u_dot_v of floats of one shape and precision; these are other messages",
)
REDUCED_MESSAGES = EdgeOperation(
    {"xla": reductions_by_xla, "chunked": chunked_reductions},
    elements_of_reductions,
    "reduces messages of floats of one precision; these are others",
)


def compute_messages(frame: Frame, message: Message, implementation: str | None = None) -> jax.Array:
    """Returns the message of each edge, [edges, ...] in its features' dtype."""
    operands = _operands(frame, message)
    return MESSAGES(implementation, frame.adjacency, message, operands)


def compute_reductions(
    frame: Frame, message: Message, reductions: Reductions, implementation: str | None = None
) -> dict[str, jax.Array]:
    """Returns what the receivers make of their messages, [receivers, ...] by name in the features' dtype."""
    for reduce in reductions:
        if reduce.message != message.out:
            raise ValueError(
                f"{message.name} makes the message {message.out!r}, but {reduce.reduction} wants {reduce.message!r}"
            )
    operands = _operands(frame, message)
    by_implementation: dict[str, Reductions] = {}
    for reduce in reductions:
        chosen = REDUCED_MESSAGES.choose(implementation, frame.adjacency, message, (reduce,), operands)
        by_implementation[chosen] = (*by_implementation.get(chosen, ()), reduce)
    results = {}
    for chosen, some in by_implementation.items():
        results |= REDUCED_MESSAGES(chosen, frame.adjacency, message, some, operands)
    return results


def reduce_messages(adjacency: Adjacency, messages: jax.Array, reductions: Reductions) -> dict[str, jax.Array]:
    """Returns what the receivers make of messages that are there, [receivers, ...] by name in their dtype."""
    return in_float32(lambda x: reduce_rows(adjacency, reductions, upcast(x)), messages)


def _operands(frame: Frame, message: Message) -> list[jax.Array]:
    """Returns the features that a message is made of, checked."""
    features = {"u": frame.src, "v": frame.dst, "e": frame.data}
    operands = []
    for end, name in message.operands:
        if name not in features[end]:
            known = ", ".join(map(repr, features[end])) or "none"
            raise ValueError(f"{message.name}: no {ENDS[end]} feature {name!r}; there are: {known}")
        operands.append(features[end][name])
    if len(operands) == 2:
        _check_shapes(message, *operands)
    return operands


def _check_shapes(message: Message, left: jax.Array, right: jax.Array) -> None:
    shapes = left.shape[1:], right.shape[1:]
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    if message.operation == "dot" and aligned[0][-1:] != aligned[1][-1:]:
        fault = "the last axes differ"
    elif _do_broadcast(aligned):
        return
    else:
        fault = "they do not broadcast"
    (left_end, left_name), (right_end, right_name) = message.operands
    raise ValueError(
        f"{message.name}: feature {left_name!r} of the {ENDS[left_end]} and {right_name!r} of the "
        f"{ENDS[right_end]} have shapes {shapes[0]} and {shapes[1]} after their first axes: {fault}"
    )


def _do_broadcast(shapes: Sequence[tuple[int, ...]]) -> bool:
    try:
        jnp.broadcast_shapes(*shapes)
    except ValueError:
        return False
    return True
