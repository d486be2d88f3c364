"""Messages of edges and their reduction at nodes, by built-in or user-defined functions."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import BuiltIn, End, Message, Reduce
from jmp_train.graphs.kernels import (
    CheckedMessage,
    EdgeOperation,
    Reductions,
    chunked_dot,
    chunked_reductions,
    elements_of_dot,
    elements_of_reductions,
    messages_by_xla,
    reductions_by_xla,
)
from jmp_train.graphs.messages.edge_messages import PER_EDGE, PerEdge, reduce_all
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.user_functions import (
    EdgeFunction,
    NodeFunction,
    call_message_function,
    call_reduce_function,
)
from jmp_train.graphs.structure import accumulation_dtype, in_float32, is_one_precision

_ENDS: dict[End, str] = {"u": "sender", "v": "receiver", "e": "edge"}

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

# What `update_all` and its kin take: one reduction, several of the same messages, or a function.
Reduction = Reduce | Sequence[Reduce] | NodeFunction


def send(
    frame: Frame,
    message: Message | EdgeFunction,
    ids: jax.Array | None = None,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Returns the messages [edges, ...] by name.

    Args:
      frame: the edges.
      message: built in or not.
      ids: int [edges], the places of these edges in the graph; None if they are all.
      implementation: see `EdgeOperation`.

    Raises:
      ValueError: a feature is missing, or shapes do not fit.
      TypeError: the function returns no dictionary of arrays.
    """
    if isinstance(message, Message):
        checked, operands = _checked(frame, message)
        kernel = functools.partial(MESSAGES, implementation, frame.adjacency, checked)
        return {message.out: in_float32(kernel, *operands)}
    _check_function("message", message, 'fn.copy_u("h", "m")')
    return call_message_function(message, frame, ids)


def receive(
    frame: Frame,
    message: Message | EdgeFunction,
    reduce: Reduction,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Returns the reductions of messages, [receivers, ...] by name.

    Args:
      frame: the edges.
      message: built in or not.
      reduce: one built in or several, or a function.
      implementation: see `EdgeOperation`.

    Raises:
      ValueError: a feature or message is missing, or shapes do not fit.
      TypeError: a function does not return a dictionary of arrays, or there are no mailboxes under jit.
    """
    reductions = _reductions(reduce)
    if reductions is None:
        assert callable(reduce)
        return call_reduce_function(reduce, frame, send(frame, message))
    if isinstance(message, Message):
        _check_names(message, reductions)
        checked, operands = _checked(frame, message)
        kernel = functools.partial(REDUCED_MESSAGES, implementation, frame.adjacency, checked, reductions)
        return in_float32(kernel, *operands)
    if isinstance(message, PerEdge):
        return PER_EDGE(implementation, frame.adjacency, frame, message, reductions)
    if implementation == "chunked":
        raise ValueError('implementation="chunked" needs functions of one edge: mark yours with graphs.per_edge')
    return reduce_all(frame, send(frame, message), reductions)


def _reductions(reduce: Reduction) -> tuple[Reduce, ...] | None:
    """Returns reductions that are built in; None of a function."""
    if isinstance(reduce, Reduce):
        return (reduce,)
    if not isinstance(reduce, Sequence):
        _check_function("reduce", reduce, 'fn.sum("m", "x")')
        return None
    for place, one in enumerate(reduce):
        if not isinstance(one, Reduce):
            raise TypeError(f'reduce[{place}] must be a reduction, such as fn.sum("m", "x"), got {one!r}')
    names = [one.out for one in reduce]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"results of reduce must have different names, got {names}")
    return tuple(reduce)


def _check_function(name: str, function: object, example: str) -> None:
    if not callable(function) or isinstance(function, BuiltIn):
        raise TypeError(f"{name} must be a function or a built-in one, such as {example}, got {function!r}")


def _check_names(message: Message, reductions: Reductions) -> None:
    for reduce in reductions:
        if reduce.message != message.out:
            raise ValueError(
                f"{message.name} returns the message {message.out!r}, but {reduce.reduction} needs {reduce.message!r}"
            )


def _checked(frame: Frame, message: Message) -> tuple[CheckedMessage, list[jax.Array]]:
    """Returns a built-in message and its features."""
    features = {"u": frame.src, "v": frame.dst, "e": frame.data}
    operands = []
    for end, name in message.operands:
        if name not in features[end]:
            known = ", ".join(map(repr, features[end])) or "none"
            raise ValueError(f"{message.name}: no {_ENDS[end]} feature {name!r}; there are: {known}")
        operands.append(features[end][name])
    shape = operands[0].shape[1:] if len(operands) == 1 else _shape(message, *operands)
    dtype = accumulation_dtype(operands[0].dtype) if is_one_precision(*operands) else None
    return CheckedMessage(message, shape, dtype), operands


def _shape(message: Message, left: jax.Array, right: jax.Array) -> tuple[int, ...]:
    """Returns the shape of one edge's message."""
    shapes = left.shape[1:], right.shape[1:]
    rank = max(map(len, shapes))
    aligned = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    fault = "the last axes differ" if message.operation == "dot" and aligned[0][-1:] != aligned[1][-1:] else ""
    try:
        shape = jnp.broadcast_shapes(*aligned)
    except ValueError:
        shape, fault = (), fault or "they do not broadcast"
    if fault:
        (left_end, left_name), (right_end, right_name) = message.operands
        raise ValueError(
            f"{message.name}: feature {left_name!r} of the {_ENDS[left_end]} and {right_name!r} of the "
            f"{_ENDS[right_end]} have shapes {shapes[0]} and {shapes[1]} after their first axes: {fault}"
        )
    return (*shape[:-1], 1) if message.operation == "dot" and shape else shape
