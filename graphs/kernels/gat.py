"""GAT's attention, with the logits `leaky_relu(left[u] + right[v])`, and its own gradient.

A product of sums is cheaper than the sum of the edges' products, which XLA stores on CPUs: the products of the messages
and the gradient, weighted and added over a block, are the product of the gradient and the weighted sum of the messages.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.attention import (
    Attention,
    Gradients,
    OfEdge,
    SoftmaxSums,
    factor_of,
    split,
    times,
    with_rows,
)
from jmp_train.graphs.kernels.edge_programs import EdgeIds, Ends
from jmp_train.graphs.kernels.native_calls import native_gat, native_gat_gradient, on_cpus, takes, with_derivative_of
from jmp_train.graphs.kernels.sums_over_edges import sums_without_gradient
from jmp_train.graphs.structure import CSRAndCSC, upcast


@dataclasses.dataclass(frozen=True)
class GATAttention(Attention):
    """The attention of GAT; the senders' rows are features and the left ends of logits."""

    negative_slope: float

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> OfEdge:
        """Returns what it is for one edge."""
        features, left = inputs.senders
        logits = jax.nn.leaky_relu(left + inputs.receivers, self.negative_slope)
        return OfEdge(logits, [features], factor_of(fixed.shared, ids, inputs.edge))

    def sums(self, dtype: DTypeLike | None, edges: CSRAndCSC, fixed: Ends, inputs: Ends) -> SoftmaxSums:
        """Returns the weighted sums."""
        chunked = functools.partial(Attention.sums, self, dtype)

        def native(edges: CSRAndCSC, fixed: Ends, inputs: Ends) -> SoftmaxSums:
            del fixed
            features, left = inputs.senders
            ends = upcast(left), upcast(inputs.receivers)
            total, *rest = native_gat(self.negative_slope, edges.by_target, features, *ends)
            return SoftmaxSums([total], *rest)

        if not _is_native(edges, fixed, inputs):
            return chunked(edges, fixed, inputs)
        return on_cpus(native, chunked, edges, fixed, inputs)

    def gradients(self, edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> Ends:
        """Returns the gradients of the inputs."""

        def native(edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> Ends:
            (most, _), (features, left), right = fixed.receivers, inputs.senders, inputs.receivers
            ends = upcast(left), upcast(right), most, back.inverse, back.of_totals[0]
            of_features, of_left, of_right = native_gat_gradient(
                self.negative_slope, edges.by_target, edges.by_source, features, *ends
            )
            return Ends((upcast(of_features), of_left), of_right, inputs.edge)

        value: Any = self._swapped
        if _is_native(edges, split(fixed)[1], inputs):
            value = functools.partial(jax.lax.platform_dependent, cpu=native, default=self._swapped)
        plain = functools.partial(Attention.gradients, self)
        return with_derivative_of(plain, value, edges, fixed, inputs, back)

    def means(self, edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> jax.Array:
        """Returns the sums of products of messages and gradients."""

        def swapped(edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> jax.Array:
            parts = _Parts(self.negative_slope, are_means=True)
            return sums_without_gradient(parts, edges, fixed, with_rows(inputs, back), _finished_means).receivers

        return with_derivative_of(functools.partial(Attention.means, self), swapped, edges, fixed, inputs, back)

    def _swapped(self, edges: CSRAndCSC, fixed: Ends, inputs: Ends, back: Gradients) -> Ends:
        found = sums_without_gradient(_Parts(self.negative_slope), edges, fixed, with_rows(inputs, back), _finished)
        plain = None if inputs.edge is None else Attention.gradients(self, edges, fixed, inputs, back).edge
        return found._replace(edge=plain)


def _is_native(edges: CSRAndCSC, fixed: Ends, inputs: Ends) -> bool:
    features, left = inputs.senders
    is_plain = not jax.tree.leaves((fixed, inputs.edge))
    return is_plain and takes(features.dtype, edges.by_target, features, left, inputs.receivers)


@dataclasses.dataclass(frozen=True)
class _Parts:
    """The sums of which the gradient is made: of messages and of the gradients, weighted by slopes of the softmax."""

    negative_slope: float
    are_means: bool = False

    def __call__(self, fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
        (most, fixed), (back, inputs) = split(fixed), split(inputs)
        (features, left), factor = inputs.senders, factor_of(fixed.shared, ids, inputs.edge)
        both, (gradient,) = left + inputs.receivers, back.of_totals
        weights = jnp.exp(jax.nn.leaky_relu(both, self.negative_slope) - most) * back.inverse
        slopes = jnp.where(both >= 0, weights, self.negative_slope * weights)
        weighted = times(weights, factor)
        if self.are_means:
            return Ends(receivers=times(features, weighted))
        sloped = times(slopes, factor)
        senders = times(gradient, weighted), times(gradient, sloped), slopes * back.shift
        return Ends(senders, (times(features, sloped), slopes))


def _finished_means(here: str, sums: Any, fixed: Any, inputs: Any) -> jax.Array:
    del here, fixed
    (gradient,), *_ = inputs[0]
    return (sums * gradient).sum(-1)


def _finished(here: str, sums: Any, fixed: Any, inputs: Any) -> Any:
    """Returns the gradients of the ends of logits, and of the features."""
    del fixed
    if here == "receivers":
        (gradient,), _, shift = inputs[0]
        return (sums[0] * gradient).sum(-1) - shift * sums[1]
    return sums[0], (sums[1] * inputs[0]).sum(-1) - sums[2]
