"""Attention over edges: sums of messages, weighted by a softmax over the edges that enter a node, of any logits.

An attention is a pure function of one edge to its logits, messages and the factors of its weights. With `s` the logit,
m the largest one of a node, i the inverse of the sum of `exp(s - m)` there, and k the factor, the result is the sum of
`a k z` for messages z, with `a = exp(s - m) i`. With g the gradient of the result, and `t = g . z`, that of s is
`a (k t - d)`, where d is the sum of `a k t` over the node's edges. The difference is taken for each edge, or for each
block: sums of both terms would cancel at nodes with many edges.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.chunks import run_chunked
from jmp_train.graphs.kernels.edge_programs import EdgeIds, Ends
from jmp_train.graphs.kernels.sums_over_edges import dtypes_of_edges, edge_max, edge_sums, in_dtypes
from jmp_train.graphs.kernels.threefry_dropout import EdgeDropout
from jmp_train.graphs.structure import Adjacency, CSRAndCSC, finite_or_zero, reciprocal, upcast
from jmp_train.policies.autocasting import autocast_as


class OfEdge(NamedTuple):
    """What an attention is for one edge.

    Attributes:
      logits: [heads].
      messages: arrays [heads, ...].
      factor: [heads] or [1], factors of the weights; None for 1.
    """

    logits: jax.Array
    messages: Sequence[jax.Array]
    factor: jax.Array | None


class SoftmaxSums(NamedTuple):
    """Sums weighted by a softmax.

    Attributes:
      totals: a sum [nodes, heads, ...] for each of the messages; 0 without edges.
      largest: the largest logits [nodes, heads].
      inverse: 1 over the sums of the powers of the differences to them, [nodes, heads]; 1 without edges.
    """

    totals: list[jax.Array]
    largest: jax.Array
    inverse: jax.Array

    @property
    def log_sum(self) -> jax.Array:
        """The logarithms of the sums of the logits' exponentials [nodes, heads]."""
        return self.largest - jnp.log(self.inverse)


def factor_of(dropout: EdgeDropout | None, ids: EdgeIds, weight: jax.Array | None) -> jax.Array | None:
    """Returns the factors [heads] or [1] of an edge's weights; None for 1."""
    factor = None if dropout is None else dropout.of_ids(ids)
    if weight is None:
        return factor
    weight = weight.reshape(1)
    return weight if factor is None else weight * factor.astype(weight.dtype)


def times(data: jax.Array, factor: jax.Array | None) -> jax.Array:
    """Returns data [heads, ...] times factors [heads] or [1] in its dtype; None for 1."""
    return data if factor is None else data * factor.astype(data.dtype).reshape(-1, *[1] * (data.ndim - 1))


class Gradients(NamedTuple):
    """What of the sums goes back to a node's edges.

    Attributes:
      of_totals: the gradients of the sums.
      inverse: see `SoftmaxSums`.
      shift: what is subtracted from the gradients of the weights.
    """

    of_totals: list[jax.Array]
    inverse: jax.Array
    shift: jax.Array


class Attention(Protocol):
    """An attention; it is hashable."""

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> OfEdge:
        """Returns what it is for one edge, of upcast rows without and with gradients, and the edge's ids."""
        ...

    def sums(self, dtype: DTypeLike | None, edges: CSRAndCSC, fixed: Ends, inputs: Ends) -> SoftmaxSums:
        """Returns the weighted sums; see `softmax_sums`."""
        most = finite_or_zero(edge_max(_Logits(self), edges, fixed, inputs))
        powers, totals = edge_sums(_Powers(self), edges, with_rows(fixed, most), inputs).receivers
        inverse = reciprocal(powers)
        totals = [x * inverse.reshape(*inverse.shape, *[1] * (x.ndim - 2)) for x in totals]
        return SoftmaxSums([x.astype(dtype or x.dtype) for x in totals], most, inverse)

    def means(self, edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> jax.Array:
        """Returns the sums of `a k t`; the largest logits are among the fixed rows of the receivers."""
        return edge_sums(_Means(self), edges, fixed, with_rows(inputs, back)).receivers

    def gradients(self, edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> Ends:
        """Returns the gradients of the inputs; see `means`."""
        return edge_sums(_Gradient(self, dtypes_of_edges(inputs)), edges, fixed, with_rows(inputs, back))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def softmax_sums(
    attention: Attention, dtype: DTypeLike | None, edges: CSRAndCSC, fixed: Ends, inputs: Ends
) -> SoftmaxSums:
    """Returns the messages, weighted by a softmax over each node's edges.

    Args:
      attention: the attention of one edge.
      dtype: dtype of the sums; None for that of the computation.
      edges: the edges, at least one.
      fixed: see `edge_sums`.
      inputs: see `edge_sums`.
    """
    return attention.sums(dtype, edges, fixed, inputs)


def _forward(attention: Attention, dtype: DTypeLike | None, *arguments: Any) -> tuple[SoftmaxSums, Any]:
    found = attention.sums(dtype, *arguments)
    # Sums in full precision say what a pass over the edges would find again.
    return found, (*arguments, found._replace(totals=found.totals if dtype is None else []))


def _backward(attention: Attention, dtype: DTypeLike | None, saved: Any, gradient: SoftmaxSums) -> Any:
    edges, fixed, inputs, (totals, most, inverse) = saved
    fixed = with_rows(fixed, most)
    # A logit's part of the inverse is a times minus that.
    back = Gradients(gradient.totals, inverse, gradient.inverse * inverse)
    means = _products(gradient.totals, totals) if dtype is None else attention.means(edges, fixed, inputs, back)
    found = attention.gradients(edges, fixed, inputs, back._replace(shift=back.shift + means))
    return None, None, jax.tree.map(lambda x, like: x.astype(like.dtype), found, inputs)


softmax_sums.defvjp(_forward, _backward)


def with_rows(ends: Ends, more: Any) -> Ends:
    """Returns ends with more rows at the receivers, before their own."""
    return ends._replace(receivers=(more, ends.receivers))


def split(ends: Ends) -> tuple[Any, Ends]:
    """Returns what was added to the rows of the receivers, and the rest."""
    more, own = ends.receivers
    return more, ends._replace(receivers=own)


@dataclasses.dataclass(frozen=True)
class _Logits:
    attention: Attention

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        return Ends(receivers=self.attention(fixed, inputs, ids).logits)


@dataclasses.dataclass(frozen=True)
class _Powers:
    """The powers of an edge's logits, and the messages times these and their factors."""

    attention: Attention

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        most, fixed = split(fixed)
        logits, messages, factor = self.attention(fixed, inputs, ids)
        powers = jnp.exp(logits - most)
        weights = times(powers, factor)
        return Ends(receivers=(powers, [times(x, weights) for x in messages]))


@dataclasses.dataclass(frozen=True)
class _Means:
    """The products of an edge's messages and the gradients of the sums, times weights and factors."""

    attention: Attention

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        (most, fixed), ((gradients, inverse, _), inputs) = split(fixed), split(inputs)
        logits, messages, factor = self.attention(fixed, inputs, ids)
        return Ends(receivers=times(jnp.exp(logits - most) * inverse * _products(gradients, messages), factor))


@dataclasses.dataclass(frozen=True)
class _Gradient:
    """The gradients of an attention's inputs."""

    attention: Attention
    stored: tuple[Any, ...]

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        (most, fixed), ((gradients, inverse, shift), inputs) = split(fixed), split(inputs)
        found, pullback = jax.vjp(lambda inputs: self.attention(fixed, inputs, ids), inputs)
        weights = jnp.exp(found.logits - most) * inverse
        products = _products(gradients, found.messages)
        of_logits = weights * (times(products, found.factor) - shift)
        of_messages = [times(x.astype(weights.dtype), times(weights, found.factor)) for x in gradients]
        of_factor = None
        if found.factor is not None:
            of_factor = weights * products
            of_factor = of_factor if len(found.factor) == len(weights) else of_factor.sum(keepdims=True)
            of_factor = of_factor.astype(found.factor.dtype)
        (gradient,) = pullback(OfEdge(of_logits, of_messages, of_factor))
        return in_dtypes(gradient, self.stored)


def _products(gradients: Sequence[jax.Array], messages: Sequence[jax.Array]) -> jax.Array:
    """Returns the products [heads] of messages and gradients."""
    return sum(((g * x).sum(-1) for g, x in zip(gradients, messages, strict=True)), jnp.zeros((), messages[0].dtype))


def attention_sums(
    attention: Attention, dtype: DTypeLike | None, adjacency: Adjacency, fixed: Ends, inputs: Ends
) -> SoftmaxSums:
    """Returns the result of `softmax_sums` in chunks; see there."""
    return run_chunked(functools.partial(softmax_sums, attention, dtype), adjacency.neighbors, fixed, inputs)


def attention_by_xla(attention: Attention, adjacency: Adjacency, fixed: Ends, inputs: Ends) -> SoftmaxSums:
    """Returns the result of `softmax_sums` in at least float32, with arrays of all edges, which XLA may fuse."""

    @jax.checkpoint
    def attend(adjacency: Adjacency, fixed: Ends, inputs: Ends) -> SoftmaxSums:
        senders, receivers = adjacency.senders, adjacency.receivers

        def read(ends: Ends) -> Ends:
            ends = jax.tree.map(upcast, ends)
            at_ends = (jax.tree.map(end.read, x) for end, x in zip((senders, receivers), ends, strict=False))
            return Ends(next(at_ends), next(at_ends), ends.edge, ends.shared)

        ids = EdgeIds(senders.ids, receivers.ids, jnp.arange(receivers.num_edges, dtype=jnp.int32))
        axes = Ends(0, 0, 0, None)
        logits, messages, factor = jax.vmap(attention, (axes, axes, 0))(read(fixed), read(inputs), ids)
        weights = receivers.softmax(logits)
        weights = weights if factor is None else weights * factor.astype(weights.dtype)
        totals = [receivers.sum(weights.reshape(*weights.shape, *[1] * (x.ndim - 2)) * x) for x in messages]
        logits = jnp.where(receivers.is_counted[:, None], logits, -jnp.inf)
        most = finite_or_zero(jax.lax.stop_gradient(receivers.max(logits)))
        return SoftmaxSums(totals, most, reciprocal(receivers.sum(jnp.exp(logits - receivers.read(most)))))

    return autocast_as("float32")(attend)(adjacency, fixed, inputs)
