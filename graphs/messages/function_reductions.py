"""Reductions of messages that a function of one edge makes: in chunks, or of arrays of all edges."""

import functools
import math
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels import (
    PLACES,
    EdgeOperation,
    Inputs,
    Reductions,
    of_nothing,
    once_if_compared,
    reduce_function,
    reduce_rows,
)
from jmp_train.graphs.messages.edge_messages import PerEdge, Shapes, chosen_features
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.user_functions import call_message_function
from jmp_train.graphs.structure import (
    Adjacency,
    graph_storage,
    in_float32,
    upcast,
)

Messages = Mapping[str, jax.Array]


def reduce_all(frame: Frame, messages: Messages, reductions: Reductions) -> dict[str, jax.Array]:
    """Returns reductions of the messages of all edges, [receivers, ...] by name.

    Args:
      frame: the edges.
      messages: arrays [edges, ...] by name.
      reductions: which.

    Raises:
      ValueError: a message is missing.
    """
    _check_names(messages, reductions)
    results = {}
    for name in dict.fromkeys(reduce.message for reduce in reductions):
        some = tuple(reduce for reduce in reductions if reduce.message == name)
        reduced = functools.partial(_of_rows, frame.adjacency, some)
        results |= in_float32(reduced, messages[name])
    return results


def _of_rows(adjacency: Adjacency, reductions: Reductions, messages: jax.Array) -> dict[str, jax.Array]:
    return reduce_rows(adjacency, reductions, once_if_compared(reductions, upcast(messages)))


def _by_xla(adjacency: Adjacency, frame: Frame, message: PerEdge, reductions: Reductions) -> dict[str, jax.Array]:
    del adjacency
    return reduce_all(frame, call_message_function(message, frame, None), reductions)


def _traced(frame: Frame, message: PerEdge) -> tuple[Inputs, Shapes]:
    """Returns the features that a message reads, by name, and the shapes of one edge's messages."""
    features = Inputs(frame.data, frame.src, frame.dst)
    read, shapes = message.traced(features, have_places=frame.adjacency.ends is not None)
    return chosen_features(features, read), shapes


def _elements(frame: Frame, message: PerEdge, reductions: Reductions) -> int | None:
    """Returns the size of the largest row that an edge reads or computes; None for messages that are not floats."""
    used, shapes = _traced(frame, message)
    _check_names(shapes, reductions)
    return _largest_row(used, shapes, reductions)


def _largest_row(used: Inputs, shapes: Shapes, reductions: Reductions) -> int | None:
    """Returns `_elements` of a message that was traced already."""
    reduced = [shapes[reduce.message] for reduce in reductions]
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in reduced):
        return None
    read = [x.shape[1:] for x in jax.tree.leaves(used)]
    return max(map(math.prod, [*read, *(x.shape for x in reduced)]))


def _by_chunks(adjacency: Adjacency, frame: Frame, message: PerEdge, reductions: Reductions) -> dict[str, jax.Array]:
    used, shapes = _traced(frame, message)
    edges, count = adjacency.neighbors, adjacency.num_receivers
    assert edges is not None
    if edges.by_target.num_blocks == 0 or not all(x.size for x in jax.tree.leaves((used, shapes))):
        like = {name: ((count, *x.shape), x.dtype) for name, x in shapes.items()}
        return {reduce.out: of_nothing(reduce, *like[reduce.message]) for reduce in reductions}
    results = reduce_function(edges, message.of_rows, used, _largest_row(used, shapes, reductions) or 1, reductions)
    dtypes = {reduce.out: shapes[reduce.message].dtype for reduce in reductions if reduce.reduction not in PLACES}
    return {name: graph_storage(x.astype(dtypes.get(name, x.dtype))) for name, x in results.items()}


def _check_names(messages: Mapping[str, object], reductions: Reductions) -> None:
    for reduce in reductions:
        if reduce.message not in messages:
            known = ", ".join(map(repr, messages))
            raise ValueError(f"{reduce.reduction} needs the message {reduce.message!r}; there are: {known}")


PER_EDGE = EdgeOperation(
    {"xla": _by_xla, "chunked": _by_chunks}, _elements, "reduces messages of floats; these are others"
)
