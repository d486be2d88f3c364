"""Reductions of messages that a function of one edge makes: in chunks, or of arrays of all edges."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels import (
    EdgeIds,
    EdgeOperation,
    Inputs,
    Reduced,
    Reductions,
    Terms,
    reduce_edges,
    reduce_rows,
)
from jmp_train.graphs.messages.chunked import of_nothing
from jmp_train.graphs.messages.edge_messages import PerEdge, Shapes, chosen_features
from jmp_train.graphs.messages.frames import Frame
from jmp_train.graphs.messages.user_functions import call_message_function
from jmp_train.graphs.structure import (
    Adjacency,
    finite_or_zero,
    graph_storage,
    in_float32,
    inverse_degrees,
    moments_about,
    reciprocal,
    root_or_zero,
    rows_like,
    upcast,
)
from jmp_train.policies.autocasting import autocast_as

Messages = Mapping[str, jax.Array]
Found = dict[Any, jax.Array]
Key = tuple[str, str, float]  # a message, a reduction and its temperature
_SHIFTED, _PLACES = ("var", "std", "softmax"), ("argmax", "argmin")


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
    return reduce_rows(adjacency, reductions, upcast(messages))


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
    edges, degrees = adjacency.neighbors, adjacency.in_degrees
    assert edges is not None
    if edges.by_target.num_blocks == 0 or not all(x.size for x in jax.tree.leaves((used, shapes))):
        like = {name: ((len(degrees), *x.shape), x.dtype) for name, x in shapes.items()}
        return {reduce.out: of_nothing(reduce, *like[reduce.message]) for reduce in reductions}
    elements = _largest_row(used, shapes, reductions) or 1
    wanted = sorted({(reduce.message, reduce.reduction, reduce.temperature) for reduce in reductions})

    def reduced(make: Callable[[Messages, EdgeIds], Terms], *, has_gradient: bool = True) -> Reduced:
        def terms(rows: Inputs, ids: EdgeIds) -> Terms:
            messages = message.of_rows(rows, ids)
            stored = {name: graph_storage(messages[name]) for name, _, _ in wanted}
            return autocast_as("float32")(make)(stored, ids)

        return reduce_edges(edges, terms, used, elements, has_gradient=has_gradient)

    shifts: Found = {}
    if any(name in _SHIFTED for _, name, _ in wanted):
        shifts = _shifts(degrees, reduced(functools.partial(_terms_of_shifts, wanted), has_gradient=False))
    found = reduced(functools.partial(_terms, wanted, shifts))
    results = {}
    for reduce in reductions:
        key = reduce.message, reduce.reduction, reduce.temperature
        result = autocast_as("float32")(functools.partial(_result, key, degrees))(found, shifts)
        dtype = result.dtype if reduce.reduction in _PLACES else shapes[reduce.message].dtype
        results[reduce.out] = graph_storage(result.astype(dtype))
    return results


def _terms_of_shifts(wanted: Sequence[Key], messages: Messages, ids: EdgeIds) -> Terms:
    """Returns the terms of the means and the largest logits."""
    del ids
    sums: Found = {}
    bounds: Found = {}
    for name, reduction, temperature in wanted:
        row = upcast(messages[name])
        if reduction in ("var", "std"):
            sums[name, "sum"] = row
        elif reduction == "softmax":
            bounds[name, reduction, temperature] = temperature * row
    return Terms(sums, bounds=bounds)


def _shifts(degrees: jax.Array, found: Reduced) -> Found:
    """Returns numbers near the messages, [receivers, ...], which have no gradient: means, and largest logits."""
    means = {(name, "mean"): _mean(degrees, x) for (name, _), x in found.sums.items()}
    return jax.lax.stop_gradient(means | {key: finite_or_zero(x) for key, x in found.bounds.items()})


def _terms(wanted: Sequence[Key], shifts: Found, messages: Messages, ids: EdgeIds) -> Terms:
    """Returns the terms of the sums and of the extremes that reductions need."""
    sums: Found = {}
    largest: Found = {}
    first: Found = {}
    for name, reduction, temperature in wanted:
        row = upcast(messages[name])
        if reduction in ("sum", "mean"):
            sums[name, "sum"] = row
        elif reduction in ("var", "std"):
            rest = row - shifts[name, "mean"][ids.receivers]
            sums[name, "rest"], sums[name, "square"] = rest, rest * rest
        elif reduction == "softmax":
            power = jnp.exp(temperature * row - shifts[name, reduction, temperature][ids.receivers])
            sums[name, "power", temperature], sums[name, "weighted", temperature] = power, power * row
        else:
            extremes = first if reduction in _PLACES else largest
            extremes[name, reduction] = -messages[name] if reduction.endswith("min") else messages[name]
    return Terms(sums, largest, first)


def _result(key: Key, degrees: jax.Array, found: Reduced, shifts: Found) -> jax.Array:
    """Returns one reduction [receivers, ...]."""
    name, reduction, temperature = key
    sums = found.sums
    if reduction == "sum":
        return sums[name, "sum"]
    if reduction == "mean":
        return _mean(degrees, sums[name, "sum"])
    if reduction in ("var", "std"):
        rest, square = (_mean(degrees, sums[name, part]) for part in ("rest", "square"))
        variance = moments_about(shifts[name, "mean"], rest, square)[1]
        return root_or_zero(variance) if reduction == "std" else variance
    if reduction == "softmax":
        return sums[name, "weighted", temperature] * reciprocal(sums[name, "power", temperature])
    if reduction in _PLACES:
        return found.first[name, reduction]
    largest = found.largest[name, reduction]
    return 0 - largest if reduction == "min" else largest


def _mean(degrees: jax.Array, sums: jax.Array) -> jax.Array:
    return sums * rows_like(inverse_degrees(degrees, sums), sums)


def _check_names(messages: Mapping[str, object], reductions: Reductions) -> None:
    for reduce in reductions:
        if reduce.message not in messages:
            known = ", ".join(map(repr, messages))
            raise ValueError(f"{reduce.reduction} needs the message {reduce.message!r}; there are: {known}")


PER_EDGE = EdgeOperation(
    {"xla": _by_xla, "chunked": _by_chunks}, _elements, "reduces messages of floats; these are others"
)
