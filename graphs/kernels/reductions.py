"""Reductions of messages: what of them to add and to maximize, and what to make of the sums.

A variance adds differences to a number near the mean, and a softmax powers of differences to the largest logit: these
numbers are found first, and have no gradient.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Reduce
from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.edge_functions import Reduced, Terms, reduce_edges
from jmp_train.graphs.kernels.edge_reads import EdgeIds
from jmp_train.graphs.kernels.edge_terms import Inputs, Term, extreme_term, first_edges, largest_term, sums_of_terms
from jmp_train.graphs.structure import (
    Adjacency,
    CSRAndCSC,
    finite_or_zero,
    graph_storage,
    inverse_degrees,
    moments_about,
    reciprocal,
    root_or_zero,
    rows_like,
    upcast,
)
from jmp_train.policies import autocast_as

Messages = Mapping[str, jax.Array]
Key = tuple[str, str, float]  # a message, a reduction and its temperature
PLACES = ("argmax", "argmin")
MOMENTS, SOFTMAX = ("var", "std"), ("softmax",)


def keys_of(reductions: Sequence[Reduce], *names: str) -> tuple[Key, ...]:
    """Returns what reductions compute, each once; only those of some names, if given."""
    keys = {(reduce.message, reduce.reduction, reduce.temperature) for reduce in reductions}
    return tuple(sorted(key for key in keys if not names or key[1] in names))


def terms_of(
    keys: Sequence[Key], shifts: Mapping[Any, jax.Array], messages: Mapping[str, jax.Array], *, are_shifts: bool = False
) -> dict[Any, jax.Array]:
    """Returns the terms to add or to maximize, at least float32 by name.

    Args:
      keys: which reductions.
      shifts: numbers near the messages, the rows of the messages' nodes.
      messages: messages by name.
      are_shifts: True for the terms of the shifts.
    """
    terms: dict[Any, jax.Array] = {}
    with_moments = {name for name, reduction, _ in keys if reduction in MOMENTS}  # of which the mean is one
    for key in keys:
        name, reduction, temperature = key
        row = upcast(messages[name])
        if reduction == "mean" and name in with_moments:
            continue
        if reduction in ("sum", "mean") or (reduction in MOMENTS and are_shifts):
            terms[name, "sum"] = row
        elif reduction in MOMENTS:
            rest = row - shifts[name, "mean"]
            terms[name, "rest"], terms[name, "square"] = rest, rest * rest
        elif reduction == "softmax" and are_shifts:
            terms[key] = temperature * row
        elif reduction == "softmax":
            power = jnp.exp(temperature * row - shifts[key])
            terms[name, "power", temperature], terms[name, "weighted", temperature] = power, power * row
        else:
            terms[key] = -row if reduction.endswith("min") else row
    return terms


@dataclasses.dataclass(frozen=True)
class _Terms:
    """The terms of a message, named "m", as a function of one edge.

    Attributes:
      message: returns the message.
      keys: which reductions.
      are_shifts: see `terms_of`.
    """

    message: Term
    keys: tuple[Key, ...]
    are_shifts: bool = False

    def __call__(self, fixed: dict[Any, jax.Array], inputs: Inputs) -> dict[Any, jax.Array]:
        return terms_of(self.keys, fixed, {"m": self.message((), inputs)}, are_shifts=self.are_shifts)


@dataclasses.dataclass(frozen=True)
class _Term:
    """The only one of the terms of a message."""

    message: Term
    key: Key

    def __call__(self, fixed: object, inputs: Inputs) -> jax.Array:
        del fixed
        (term,) = terms_of((self.key,), {}, {"m": self.message((), inputs)}, are_shifts=True).values()
        return term


def reduce_messages(
    message: Term, adjacency: Adjacency, inputs: Inputs, reductions: Sequence[Reduce], mean: jax.Array | None = None
) -> dict[str, jax.Array]:
    """Returns reductions of a message, named "m", [receivers, ...] by name in at least float32.

    Args:
      message: see `sums_of_terms`; it gets no fixed rows.
      adjacency: the edges, at least one, with `neighbors`.
      inputs: the inputs of the message.
      reductions: which.
      mean: the mean of the messages, if it is known.
    """
    degrees, neighbors = adjacency.in_degrees, adjacency.neighbors
    if keys_of(reductions, *PLACES):
        _ = adjacency.receivers  # which raises if edges have no places

    def sums(names: Sequence[str], shifts: dict[Any, jax.Array] | None, inputs: Inputs) -> dict[Any, jax.Array]:
        keys = keys_of(reductions, *names)
        terms = _Terms(message, keys, shifts is None)

        def kernel(edges: CSRAndCSC, shifts: dict[Any, jax.Array], inputs: Inputs) -> Any:
            return sums_of_terms(terms, "receivers", edges, shifts, inputs)

        return run_chunked(kernel, neighbors, shifts or {}, inputs) if keys else {}

    def largest(kernel: Any, *names: str) -> dict[Any, jax.Array]:
        found = {key: functools.partial(kernel, _Term(message, key)) for key in keys_of(reductions, *names)}
        return {key: run_chunked(run, neighbors, inputs) for key, run in found.items()}

    bounds = largest(largest_term, *SOFTMAX)
    of_means = {} if mean is not None else sums(MOMENTS, None, jax.lax.stop_gradient(inputs))
    shifts = shifts_of(degrees, of_means, bounds)
    if mean is not None:
        shifts["m", "mean"] = jax.lax.stop_gradient(mean)
    found = sums(("sum", "mean", *MOMENTS, *SOFTMAX), shifts, inputs)
    found |= largest(extreme_term, "max", "min") | largest(_first, *PLACES)
    return finished(reductions, degrees, found, shifts)


def _first(term: Term, edges: CSRAndCSC, inputs: Inputs) -> jax.Array:
    return first_edges(term, edges, largest_term(term, edges, inputs), inputs)


def reduce_function(
    edges: CSRAndCSC,
    function: Callable[[Inputs, EdgeIds], Messages],
    inputs: Inputs,
    elements: int,
    reductions: Sequence[Reduce],
) -> dict[str, jax.Array]:
    """Returns reductions of a function's messages, [receivers, ...] by name in at least float32.

    Each term is computed once: extremes are found among stored ones.

    Args:
      edges: the edges, at least one block.
      function: see `reduce_edges`; it returns messages by name.
      inputs: see `reduce_edges`.
      elements: see `reduce_edges`.
      reductions: which.
    """
    degrees = edges.by_target.degrees

    def reduced(make: Callable[[Messages, EdgeIds], Terms], *, has_gradient: bool = True) -> Reduced:
        def terms(rows: Inputs, ids: EdgeIds) -> Terms:
            messages = function(rows, ids)
            stored = {name: graph_storage(messages[name]) for name, _, _ in keys_of(reductions)}
            return autocast_as("float32")(make)(stored, ids)

        return reduce_edges(edges, terms, inputs, elements, has_gradient=has_gradient)

    def of_shifts(messages: Messages, ids: EdgeIds) -> Terms:
        del ids
        parts = keys_of(reductions, *MOMENTS), keys_of(reductions, *SOFTMAX)
        sums, bounds = (terms_of(keys, {}, messages, are_shifts=True) for keys in parts)
        return Terms(sums, bounds=bounds)

    def of_messages(messages: Messages, ids: EdgeIds) -> Terms:
        rows = {key: x[ids.receivers] for key, x in shifts.items()}

        def some(*names: str) -> dict[Any, jax.Array]:
            return terms_of(keys_of(reductions, *names), rows, messages)

        def exact(terms: dict[Any, jax.Array]) -> dict[Any, jax.Array]:  # in the messages' dtypes
            return {key: x.astype(messages[key[0]].dtype) for key, x in terms.items()}

        return Terms(some("sum", "mean", *MOMENTS, *SOFTMAX), exact(some("max", "min")), exact(some(*PLACES)))

    shifts: dict[Any, jax.Array] = {}
    if keys_of(reductions, *MOMENTS, *SOFTMAX):
        first = reduced(of_shifts, has_gradient=False)
        shifts = shifts_of(degrees, first.sums, first.bounds)
    found = reduced(of_messages)
    whole = found.sums | found.largest | found.first
    return autocast_as("float32")(functools.partial(finished, reductions, degrees))(whole, shifts)


def shifts_of(degrees: jax.Array, sums: Mapping[Any, Any], bounds: Mapping[Any, Any]) -> dict[Any, jax.Array]:
    """Returns numbers near the messages, [receivers, ...], which have no gradient: means, and largest logits."""
    means = {(name, "mean"): _mean(degrees, x) for (name, _), x in sums.items()}
    return jax.lax.stop_gradient(means | {key: finite_or_zero(x) for key, x in bounds.items()})


def finished(
    reductions: Sequence[Reduce], degrees: jax.Array, found: Mapping[Any, jax.Array], shifts: Mapping[Any, jax.Array]
) -> dict[str, jax.Array]:
    """Returns reductions [receivers, ...] by name, of what was added and maximized."""
    keys = {reduce.out: (reduce.message, reduce.reduction, reduce.temperature) for reduce in reductions}
    return {name: _finished(key, degrees, found, shifts) for name, key in keys.items()}


def _finished(
    key: Key, degrees: jax.Array, found: Mapping[Any, jax.Array], shifts: Mapping[Any, jax.Array]
) -> jax.Array:
    """Returns a reduction [receivers, ...] of what was added."""
    name, reduction, temperature = key
    if reduction == "sum":
        return found[name, "sum"]
    if (name, "rest") in found and reduction in ("mean", *MOMENTS):
        rest, square = (_mean(degrees, found[name, part]) for part in ("rest", "square"))
        mean, variance = moments_about(shifts[name, "mean"], rest, square)
        return {"mean": mean, "var": variance, "std": root_or_zero(variance)}[reduction]
    if reduction == "mean":
        return _mean(degrees, found[name, "sum"])
    if reduction == "softmax":
        return found[name, "weighted", temperature] * reciprocal(found[name, "power", temperature])
    if reduction in PLACES:
        return found[key]
    most = 0 - found[key] if reduction == "min" else found[key]
    return jnp.where(rows_like(degrees > 0, most), most, jnp.zeros_like(most))


def _mean(degrees: jax.Array, sums: jax.Array) -> jax.Array:
    return sums * rows_like(inverse_degrees(degrees, sums), sums)


def of_nothing(reduce: Reduce, shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> jax.Array:
    """Returns the reduction of no messages, or of messages without elements."""
    is_place = reduce.reduction in PLACES
    return jnp.full(shape, -1, jnp.int32) if is_place else jnp.zeros(shape, dtype)
