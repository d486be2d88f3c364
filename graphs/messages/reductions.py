"""Reductions of messages of functions of one edge, in chunks: what of them to add, and what to make of the sums.

A variance adds differences to a number near the mean, and a softmax powers of differences to the largest logit: these
numbers are found first, and have no gradient.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.fn import Reduce
from jmp_train.graphs.kernels import EdgeIds, Ends, Function, edge_max, edge_reductions, edge_sums, first_edges
from jmp_train.graphs.structure import (
    CSR,
    CSRAndCSC,
    finite_or_zero,
    inverse_degrees,
    moments_about,
    reciprocal,
    root_or_zero,
    rows_like,
    upcast,
)

Key = tuple[str, str, float]  # a message, a reduction and its temperature
PLACES = ("argmax", "argmin")
_MOMENTS = ("var", "std")


@dataclasses.dataclass(frozen=True)
class _Terms:
    """What of messages to add or to maximize.

    Attributes:
      message: returns messages by name, at the receivers.
      wanted: the reductions.
      are_shifts: True for the terms of what is found first.
    """

    message: Function
    wanted: tuple[Key, ...]
    are_shifts: bool = False

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        shifts, own = fixed.receivers
        messages = self.message(fixed._replace(receivers=own), inputs, ids).receivers
        return Ends(receivers=self.of(shifts, messages))

    def of(self, shifts: dict[Any, jax.Array], messages: dict[str, jax.Array]) -> dict[Any, jax.Array]:
        """Returns the terms, given numbers near the messages, and the messages."""
        terms: dict[Any, jax.Array] = {}
        for key in self.wanted:
            name, reduction, temperature = key
            row = upcast(messages[name])
            if reduction in ("sum", "mean") or (reduction in _MOMENTS and self.are_shifts):
                terms[name, "sum"] = row
            elif reduction in _MOMENTS:
                rest = row - shifts[name, "mean"]
                terms[name, "rest"], terms[name, "square"] = rest, rest * rest
            elif reduction == "softmax" and self.are_shifts:
                terms[key] = temperature * row
            elif reduction == "softmax":
                power = jnp.exp(temperature * row - shifts[key])
                terms[name, "power", temperature], terms[name, "weighted", temperature] = power, power * row
            else:
                terms[key] = -row if reduction.endswith("min") else row
        return terms


def reduce_messages(
    message: Function, edges: CSRAndCSC | CSR, fixed: Ends, inputs: Ends, reductions: Sequence[Reduce]
) -> dict[str, jax.Array]:
    """Returns reductions of messages, [receivers, ...] by name in at least float32.

    Args:
      message: returns messages by name, at the receivers.
      edges: the edges, at least one.
      fixed: see `edge_sums`.
      inputs: see `edge_sums`.
      reductions: which.
    """
    wanted = sorted({(reduce.message, reduce.reduction, reduce.temperature) for reduce in reductions})

    def of(*names: str) -> tuple[Key, ...]:
        return tuple(key for key in wanted if key[1] in names)

    def terms(*names: str, are_shifts: bool = False) -> Function | None:
        return _Terms(message, of(*names), are_shifts) if of(*names) else None

    def run(kernel: Any, function: Function | None) -> Any:
        return {} if function is None else kernel(function, edges, with_shifts({}), inputs)

    def with_shifts(shifts: dict[Any, jax.Array]) -> Ends:
        return fixed._replace(receivers=(shifts, fixed.receivers))

    degrees = (edges if isinstance(edges, CSR) else edges.by_target).degrees
    sums = run(_fixed_sums, terms(*_MOMENTS, are_shifts=True))
    bounds = run(edge_max, terms("softmax", are_shifts=True))
    shifts = _shifts(degrees, sums, bounds)
    added, largest = terms("sum", "mean", *_MOMENTS, "softmax"), terms("max", "min")
    found = [run(first_edges, terms(*PLACES))]
    if added or largest:
        found += edge_reductions(added, largest, edges, with_shifts(shifts), inputs)
    found = {key: x for part in found for key, x in dict(part).items()}
    keys = {reduce.out: (reduce.message, reduce.reduction, reduce.temperature) for reduce in reductions}
    return {name: _finished(key, degrees, found, shifts) for name, key in keys.items()}


def _shifts(degrees: jax.Array, sums: dict[Any, jax.Array], bounds: dict[Any, jax.Array]) -> dict[Any, jax.Array]:
    means = {(name, "mean"): _mean(degrees, x) for (name, _), x in sums.items()}
    return jax.lax.stop_gradient(means | {key: finite_or_zero(x) for key, x in bounds.items()})


def _fixed_sums(terms: Function, edges: CSRAndCSC | CSR, fixed: Ends, inputs: Ends) -> Any:
    return edge_sums(terms, edges, *jax.lax.stop_gradient((fixed, inputs))).receivers


def _finished(key: Key, degrees: jax.Array, found: dict[Any, jax.Array], shifts: dict[Any, jax.Array]) -> jax.Array:
    """Returns a reduction [receivers, ...] of what was added."""
    name, reduction, temperature = key
    if reduction == "sum":
        return found[name, "sum"]
    if reduction == "mean":
        return _mean(degrees, found[name, "sum"])
    if reduction in _MOMENTS:
        rest, square = (_mean(degrees, found[name, part]) for part in ("rest", "square"))
        variance = moments_about(shifts[name, "mean"], rest, square)[1]
        return root_or_zero(variance) if reduction == "std" else variance
    if reduction == "softmax":
        return found[name, "weighted", temperature] * reciprocal(found[name, "power", temperature])
    if reduction in PLACES:
        return found[key]
    most = 0 - found[key] if reduction == "min" else found[key]
    return jnp.where(rows_like(degrees > 0, most), most, jnp.zeros_like(most))


def _mean(degrees: jax.Array, sums: jax.Array) -> jax.Array:
    return sums * rows_like(inverse_degrees(degrees, sums), sums)
