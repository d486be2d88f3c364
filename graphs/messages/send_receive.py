"""Messages of edges and their reduction at nodes, by built-in or user-defined functions."""

import jax

from jmp_train.graphs.fn import BuiltIn, Message, Reduce
from jmp_train.graphs.messages.built_in import (
    compute_messages,
    compute_reduction,
    reduce_messages,
)
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.user_functions import (
    EdgeFunction,
    NodeFunction,
    call_message_function,
    call_reduce_function,
)


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
        return {message.out: compute_messages(frame, message, implementation)}
    _check_function("message", message, 'fn.copy_u("h", "m")')
    return call_message_function(message, frame, ids)


def receive(
    frame: Frame,
    message: Message | EdgeFunction,
    reduce: Reduce | NodeFunction,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Returns what receivers make of their messages, [receivers, ...] by name.

    Args:
      frame: the edges.
      message: built in or not.
      reduce: built in or not.
      implementation: see `EdgeOperation`.

    Raises:
      ValueError: a feature or message is missing, or shapes do not fit.
      TypeError: a function does not return a dictionary of arrays, or there are no mailboxes under jit.
    """
    if isinstance(message, Message) and isinstance(reduce, Reduce):
        return {reduce.out: compute_reduction(frame, message, reduce, implementation)}
    if not isinstance(reduce, Reduce):
        _check_function("reduce", reduce, 'fn.sum("m", "x")')
        return call_reduce_function(reduce, frame, send(frame, message))
    messages = send(frame, message)
    if reduce.message not in messages:
        known = ", ".join(map(repr, messages))
        raise ValueError(f"{reduce.reduction} wants the message {reduce.message!r}; there are: {known}")
    result = reduce_messages(frame.adjacency, messages[reduce.message], reduce.reduction)
    return {reduce.out: result}


def _check_function(name: str, function: object, example: str) -> None:
    if not callable(function) or isinstance(function, BuiltIn):
        raise TypeError(f"{name} must be a function, or built in, such as {example}, got {function!r}")
