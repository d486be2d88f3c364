"""Variances and softmax aggregation of weighted senders, chunk by chunk: nothing is stored for an edge."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.edge_terms import Inputs, largest_term, sums_of_terms
from jmp_train.graphs.kernels.spmm_sddmm import Scales, weighted_sum
from jmp_train.graphs.structure import (
    Adjacency,
    CSRAndCSC,
    accumulation_dtype,
    finite_or_zero,
    inverse_degrees,
    moments_about,
    reciprocal,
)


def _message(inputs: Inputs) -> jax.Array:
    return inputs.senders if isinstance(inputs.edge, tuple) else inputs.edge * inputs.senders


@dataclasses.dataclass(frozen=True)
class _Deviations:
    """A message's difference to a fixed number, and its square."""

    def __call__(self, fixed: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        rest = _message(inputs) - fixed
        return rest, rest * rest


@dataclasses.dataclass(frozen=True)
class _Logits:
    """A message times a temperature."""

    temperature: float

    def __call__(self, fixed: Any, inputs: Inputs) -> jax.Array:
        del fixed
        return self.temperature * _message(inputs)


@dataclasses.dataclass(frozen=True)
class _Powers:
    """The power of a message's logit, relative to a fixed one, and the message weighted by it."""

    temperature: float

    def __call__(self, fixed: jax.Array, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
        message = _message(inputs)
        power = jnp.exp(self.temperature * message - fixed)
        return power, power * message


def chunked_moments(adjacency: Adjacency, data: jax.Array, weights: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Returns the means and variances [receivers, heads, width] of weighted senders, in at least float32.

    Args:
      adjacency: who sends to whom, with `neighbors`.
      data: floating [senders, heads, width].
      weights: floating [edges, heads] or [edges, 1]; None for 1.
    """
    scale = inverse_degrees(adjacency.in_degrees, data)
    mean = functools.partial(weighted_sum, accumulation_dtype(data.dtype))
    fixed = jax.lax.stop_gradient((data, weights))
    shift = run_chunked(mean, adjacency.neighbors, Scales(receivers=scale), *fixed)
    rest, square = _sums(_Deviations(), adjacency, shift, _inputs(data, weights))
    scale = scale[:, None, None]
    return moments_about(shift, rest * scale, square * scale)


def chunked_softmax_sum(
    temperature: float, adjacency: Adjacency, data: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns weighted senders, summed by the softmax of themselves, [receivers, heads, width] in at least float32.

    Args:
      temperature: by which they are multiplied before powers are taken of them.
      adjacency: see `chunked_moments`.
      data: see `chunked_moments`.
      weights: see `chunked_moments`.
    """
    inputs = _inputs(data, weights)

    def most(edges: CSRAndCSC, inputs: Inputs) -> jax.Array:
        return largest_term(_Logits(temperature), edges, inputs)

    shift = finite_or_zero(run_chunked(most, adjacency.neighbors, inputs))
    sizes, total = _sums(_Powers(temperature), adjacency, shift, inputs)
    return total * reciprocal(sizes)


def _inputs(data: jax.Array, weights: jax.Array | None) -> Inputs:
    """Returns what terms are of; weights of all of a row are weights of one head."""
    return Inputs(() if weights is None else weights, data)


def _sums(
    term: Callable[[jax.Array, Inputs], Any], adjacency: Adjacency, fixed: jax.Array, inputs: Inputs
) -> tuple[jax.Array, jax.Array]:
    def kernel(edges: CSRAndCSC, fixed: jax.Array, inputs: Inputs) -> Any:
        return sums_of_terms(term, "receivers", edges, fixed, inputs)

    return run_chunked(kernel, adjacency.neighbors, fixed, inputs)
