"""Messages of edges and their reduction at nodes, by built-in or user-defined functions."""

from collections.abc import Sequence

import jax

from jmp_train.graphs.fn import BuiltIn, Message, Reduce
from jmp_train.graphs.messages.built_in import (
    compute_messages,
    compute_reductions,
)
from jmp_train.graphs.messages.edge_messages import PerEdge
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.function_reductions import PER_EDGE, reduce_all
from jmp_train.graphs.messages.user_functions import (
    EdgeFunction,
    NodeFunction,
    call_message_function,
    call_reduce_function,
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
        return {message.out: compute_messages(frame, message, implementation)}
    _check_function("message", message, 'fn.copy_u("h", "m")')
    return call_message_function(message, frame, ids)


def receive(
    frame: Frame,
    message: Message | EdgeFunction,
    reduce: Reduction,
    implementation: str | None = None,
) -> dict[str, jax.Array]:
    """Returns what receivers make of their messages, [receivers, ...] by name.

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
        return compute_reductions(frame, message, reductions, implementation)
    if isinstance(message, PerEdge):
        return PER_EDGE(implementation, frame.adjacency, frame, message, reductions)
    if implementation == "chunked":
        raise ValueError('implementation="chunked" takes functions of one edge: mark it by graphs.per_edge')
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
        raise ValueError(f"reduce must be reductions with results of different names, got {names}")
    return tuple(reduce)


def _check_function(name: str, function: object, example: str) -> None:
    if not callable(function) or isinstance(function, BuiltIn):
        raise TypeError(f"{name} must be a function, or built in, such as {example}, got {function!r}")
