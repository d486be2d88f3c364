"""Reductions of any message, chunk by chunk, without storing values per edge."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.edge_terms import (
    Inputs,
    Term,
    extreme_term,
    first_edges,
    largest_term,
    sums_of_terms,
)
from jmp_train.graphs.structure import (
    Adjacency,
    CSRAndCSC,
    finite_or_zero,
    inverse_degrees,
    moments_about,
    reciprocal,
    rows_like,
)


def weighted_sender(fixed: Any, inputs: Inputs) -> jax.Array:
    """Returns the senders' rows [rows, heads, width], times the edges' weights [rows, heads, 1] if given.

    Args:
      fixed: unused.
      inputs: the senders' features and, if given, the weights.
    """
    del fixed
    return inputs.senders if isinstance(inputs.edge, tuple) else inputs.edge * inputs.senders


@dataclasses.dataclass(frozen=True)
class _Deviations:
    """A message's difference to a fixed number, and its square."""

    message: Term

    def __call__(self, fixed: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        rest = self.message((), inputs) - fixed
        return rest, rest * rest


@dataclasses.dataclass(frozen=True)
class _Times:
    """A message times a number."""

    message: Term
    factor: float

    def __call__(self, fixed: Any, inputs: Inputs) -> jax.Array:
        return self.factor * self.message(fixed, inputs)


@dataclasses.dataclass(frozen=True)
class _Powers:
    """The exponential of a message's logit, relative to a fixed one, and the message weighted by it."""

    message: Term
    temperature: float

    def __call__(self, fixed: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        message = self.message((), inputs)
        power = jnp.exp(self.temperature * message - fixed)
        return power, power * message


def chunked_sum(message: Term, adjacency: Adjacency, inputs: Inputs) -> jax.Array:
    """Returns the sums [receivers, ...] of messages in at least float32.

    Args:
      message: returns the message for the inputs' rows, without fixed ones.
      adjacency: the edges, with `neighbors`.
      inputs: the inputs of the message.
    """
    return _sums(message, adjacency, (), inputs)


def chunked_mean(message: Term, adjacency: Adjacency, inputs: Inputs) -> jax.Array:
    """Returns the means [receivers, ...] of messages in at least float32; see `chunked_sum`."""
    return _mean(adjacency, chunked_sum(message, adjacency, inputs))


def chunked_moments(
    message: Term, adjacency: Adjacency, inputs: Inputs, shift: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns the means and variances [receivers, ...] of messages in at least float32.

    Args:
      message: see `chunked_sum`.
      adjacency: see `chunked_sum`.
      inputs: see `chunked_sum`.
      shift: the approximate means, if known.
    """
    if shift is None:
        shift = chunked_mean(message, adjacency, jax.lax.stop_gradient(inputs))
    shift = jax.lax.stop_gradient(shift)
    rest, square = _sums(_Deviations(message), adjacency, shift, inputs)
    return moments_about(shift, _mean(adjacency, rest), _mean(adjacency, square))


def chunked_softmax_sum(message: Term, temperature: float, adjacency: Adjacency, inputs: Inputs) -> jax.Array:
    """Returns the sums of messages weighted by their own softmax, [receivers, ...] in at least float32.

    Args:
      message: see `chunked_sum`.
      temperature: factor of the messages in the softmax.
      adjacency: see `chunked_sum`.
      inputs: see `chunked_sum`.
    """
    logits = _Times(message, temperature)
    shift = finite_or_zero(_run(functools.partial(largest_term, logits), adjacency, inputs))
    sizes, total = _sums(_Powers(message, temperature), adjacency, shift, inputs)
    return total * reciprocal(sizes)


def chunked_extreme(message: Term, sign: int, adjacency: Adjacency, inputs: Inputs) -> jax.Array:
    """Returns the largest or least messages [receivers, ...] in at least float32; 0 without edges.

    Args:
      message: see `chunked_sum`.
      sign: 1 for the largest, -1 for the least.
      adjacency: see `chunked_sum`.
      inputs: see `chunked_sum`.
    """
    most = sign * _run(functools.partial(extreme_term, _signed(message, sign)), adjacency, inputs)
    return jnp.where(rows_like(adjacency.in_degrees > 0, most), most, jnp.zeros_like(most))


def chunked_argextreme(message: Term, sign: int, adjacency: Adjacency, inputs: Inputs) -> jax.Array:
    """Returns the first edges with the largest or least messages, int32 [receivers, ...]; -1 without edges.

    Args:
      message: see `chunked_extreme`.
      sign: see `chunked_extreme`.
      adjacency: see `chunked_extreme`.
      inputs: see `chunked_extreme`.

    Raises:
      ValueError: the graph does not store the places of its edges.
    """
    _ = adjacency.receivers  # which raises
    term = _signed(message, sign)

    def places(edges: CSRAndCSC, inputs: Inputs) -> jax.Array:
        return first_edges(term, edges, largest_term(term, edges, inputs), inputs)

    return _run(places, adjacency, inputs)


def _signed(message: Term, sign: int) -> Term:
    return message if sign == 1 else _Times(message, -1)


def _mean(adjacency: Adjacency, sums: jax.Array) -> jax.Array:
    return sums * rows_like(inverse_degrees(adjacency.in_degrees, sums), sums)


def _run(kernel: Callable[[CSRAndCSC, Inputs], Any], adjacency: Adjacency, inputs: Inputs) -> Any:
    return run_chunked(kernel, adjacency.neighbors, inputs)


def _sums(term: Term, adjacency: Adjacency, fixed: Any, inputs: Inputs) -> Any:
    def kernel(edges: CSRAndCSC, fixed: Any, inputs: Inputs) -> Any:
        return sums_of_terms(term, "receivers", edges, fixed, inputs)

    return run_chunked(kernel, adjacency.neighbors, fixed, inputs)
