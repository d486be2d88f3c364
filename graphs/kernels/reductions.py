"""Reductions of any message, chunk by chunk, without storing values per edge.

A message is a term of rows of both ends, with a custom gradient, or any function of the ids of both ends, which jax
differentiates. `reduce_blocks` passes such a function blocks of a few edges of one node each, of which one row is kept.
The gradient computes a chunk's edges again. Arrays that the function closes over, such as a network's parameters, get
gradients that are added over the chunks in float32; since each chunk adds to all of them, there are at most 64 chunks.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jraph

from jmp_train.graphs.kernels.chunks import CPU_ELEMENTS, at, run_chunked
from jmp_train.graphs.kernels.edge_terms import (
    Inputs,
    Term,
    extreme_term,
    first_edges,
    largest_term,
    sums_of_terms,
)
from jmp_train.graphs.structure import (
    CSR,
    Adjacency,
    CSRAndCSC,
    finite_or_zero,
    inverse_degrees,
    moments_about,
    reciprocal,
    rows_like,
    upcast,
)

_MOST_CHUNKS = 64
BlockReduction = Literal["max", "sum", "mean"]
# Makes messages [edges, width] of the ids of edges' senders and receivers, int32 [edges].
Messages = Callable[[jax.Array, jax.Array], jax.Array]


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


def reduce_blocks(neighbors: CSR, messages: Messages, reduction: BlockReduction) -> jax.Array:
    """Returns the reduction of messages, [nodes, width] in their dtype; 0 for nodes without edges.

    Args:
      neighbors: the edges, sorted by their receivers.
      messages: a function of one edge.
      reduction: the reduction.
    """
    like = jax.eval_shape(messages, *[jnp.zeros(1, jnp.int32)] * 2)
    if neighbors.num_blocks == 0:
        return jnp.zeros((neighbors.num_nodes, *like.shape[1:]), like.dtype)
    size = _blocks_per_chunk(neighbors, math.prod(like.shape[1:]))
    pure, closed_over = jax.closure_convert(messages, *[jnp.zeros(size * neighbors.width, jnp.int32)] * 2)
    wide = [upcast(x) for x in closed_over]

    @jax.checkpoint
    def of_chunk(wide: list[jax.Array], chunk: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        starts, counts, nodes = chunk
        places = jnp.arange(neighbors.width, dtype=jnp.int32)
        positions = jnp.minimum(starts[:, None] + places, neighbors.others.shape[0] - 1)
        senders, receivers = at(neighbors.others, positions).ravel(), jnp.repeat(nodes, neighbors.width)
        narrow = [x.astype(own.dtype) for x, own in zip(wide, closed_over, strict=True)]
        rows = pure(senders, receivers, *narrow).reshape(*positions.shape, -1)
        is_edge = (places < counts[:, None])[..., None]
        if reduction == "max":  # exact in half
            return jnp.where(is_edge, rows, jnp.asarray(-jnp.inf, rows.dtype)).max(1)
        rows = upcast(rows)
        return jnp.where(is_edge, rows, jnp.zeros_like(rows)).sum(1)

    chunks = tuple(_in_chunks(x, size) for x in (neighbors.starts, neighbors.counts, neighbors.nodes))
    rows = jax.lax.map(lambda chunk: of_chunk(wide, chunk), chunks)
    rows = rows.reshape(-1, *rows.shape[2:])[: neighbors.num_blocks]
    if reduction == "max":
        found = jraph.segment_max(rows, neighbors.nodes, neighbors.num_nodes, indices_are_sorted=True)
        return jnp.where(rows_like(neighbors.degrees > 0, found), found, jnp.zeros_like(found))
    total = jraph.segment_sum(rows, neighbors.nodes, neighbors.num_nodes, indices_are_sorted=True)
    if reduction == "mean":
        total = total / rows_like(jnp.maximum(neighbors.degrees, 1).astype(total.dtype), total)
    return total.astype(like.dtype)


def _blocks_per_chunk(neighbors: CSR, elements: int) -> int:
    """Returns the number of blocks per chunk for messages of a number of elements."""
    in_cache = CPU_ELEMENTS // max(1, elements * neighbors.width)
    return max(in_cache, -(-neighbors.num_blocks // _MOST_CHUNKS))


def _in_chunks(array: jax.Array, size: int) -> jax.Array:
    """Returns an array [blocks] as [chunks, size], with zeros behind."""
    return jnp.pad(array, (0, -len(array) % size)).reshape(-1, size)
