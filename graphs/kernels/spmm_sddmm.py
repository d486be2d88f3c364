"""Weighted sums of neighbors (SpMM) and products of both ends (SDDMM), in chunks: each is the other's gradient.

Both have custom gradients that save their arguments in the stored dtypes, so reverse derivatives of every order consist
of these two.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jmp_train.graphs.kernels.edge_programs import EdgeIds, Ends
from jmp_train.graphs.kernels.native_calls import Scales, native_dot, native_sum, on_cpus, takes
from jmp_train.graphs.kernels.sums_over_edges import edge_sums
from jmp_train.graphs.structure import CSRAndCSC, accumulation_dtype, common_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(
    dtype: DTypeLike | None,
    edges: CSRAndCSC,
    scales: Scales,
    data: jax.Array,
    weights: jax.Array | None,
) -> jax.Array:
    """Returns the sums [receivers, heads, width] of weights times the senders' rows, computed in float32.

    Args:
      dtype: dtype of the result; None for that of the computation.
      edges: the edges.
      scales: factors of the rows and sums.
      data: floating [senders, heads, width].
      weights: floating [edges, heads] or [edges, 1]; None for 1.
    """
    common = data.dtype if weights is None else common_dtype(data.dtype, weights.dtype)
    dtype = accumulation_dtype(common) if dtype is None else jnp.dtype(dtype)
    chunked = functools.partial(_chunked_sum, dtype)
    arguments = edges, scales, data, weights
    if not takes(dtype, edges.by_target, *arguments[1:]):
        return chunked(*arguments)
    return on_cpus(functools.partial(native_sum, dtype), chunked, *arguments)


def _chunked_sum(
    dtype: DTypeLike, edges: CSRAndCSC, scales: Scales, data: jax.Array, weights: jax.Array | None
) -> jax.Array:
    sums = edge_sums(weighted_sender, edges, Ends(scales.senders), Ends(data, edge=weights)).receivers
    if scales.receivers is not None:
        sums = sums * scales.receivers.astype(sums.dtype)[:, None, None]
    return sums.astype(dtype)


def weighted_sender(fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
    """Returns a sender's row [heads, width], times a scale and the edge's weights [heads] or [1], if given."""
    del ids
    row = inputs.senders
    for factor in (fixed.senders, inputs.edge):
        row = (
            row if factor is None or isinstance(factor, tuple) else jnp.reshape(factor, (-1, 1)).astype(row.dtype) * row
        )
    return Ends(receivers=row)


@jax.custom_vjp
def edge_dot(edges: CSRAndCSC, scales: Scales, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    """Returns the products [edges, heads] of the rows at both ends, summed over the width.

    Args:
      edges: the edges.
      scales: factors of the rows at both ends.
      senders: floating [senders, heads, width].
      receivers: floating [receivers, heads, width].

    Returns:
      The products, in the dtype that both promote to; 0 for edges that count nowhere.
    """
    arguments = edges, scales, senders, receivers
    if not takes(senders.dtype, edges.by_target, *arguments[1:]):
        return _chunked_dot(*arguments)
    return on_cpus(native_dot, _chunked_dot, *arguments)


def _chunked_dot(edges: CSRAndCSC, scales: Scales, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    dtype = common_dtype(senders.dtype, receivers.dtype)
    return edge_sums(_product, edges, Ends(*scales), Ends(senders, receivers)).edge.astype(dtype)


def _product(fixed: Ends, inputs: Ends, ids: EdgeIds) -> Ends:
    del ids
    products = (inputs.senders * inputs.receivers).sum(-1)
    for scale in fixed[:2]:
        products = products if scale is None else products * scale.astype(products.dtype)
    return Ends(edge=products)


_OfSum = tuple[CSRAndCSC, Scales, jax.Array, jax.Array | None]
_OfDot = tuple[CSRAndCSC, Scales, jax.Array, jax.Array]


def _sum_forward(
    dtype: DTypeLike | None,
    edges: CSRAndCSC,
    scales: Scales,
    data: jax.Array,
    weights: jax.Array | None,
) -> tuple[Any, _OfSum]:
    return weighted_sum(dtype, edges, scales, data, weights), (edges, scales, data, weights)


def _sum_backward(dtype: DTypeLike | None, saved: _OfSum, gradient: jax.Array) -> tuple[None, None, Any, Any]:
    del dtype
    edges, scales, data, weights = saved
    reversed_scales = Scales(scales.receivers, scales.senders)
    of_data = weighted_sum(data.dtype, edges.reversed(), reversed_scales, gradient, weights)
    if weights is None:
        return None, None, of_data, None
    if weights.shape[1] == 1:  # all of a row is one head
        width = math.prod(data.shape[1:])
        data, gradient = (x.reshape(-1, 1, width) for x in (data, gradient))
    of_weights = edge_dot(edges, scales, data, gradient).astype(weights.dtype)
    return None, None, of_data, of_weights


def _dot_forward(edges: CSRAndCSC, scales: Scales, senders: jax.Array, receivers: jax.Array) -> tuple[Any, _OfDot]:
    return edge_dot(edges, scales, senders, receivers), (edges, scales, senders, receivers)


def _dot_backward(saved: _OfDot, gradient: jax.Array) -> tuple[None, None, Any, Any]:
    edges, scales, senders, receivers = saved
    reversed_scales = Scales(scales.receivers, scales.senders)
    of_senders = weighted_sum(senders.dtype, edges.reversed(), reversed_scales, receivers, gradient)
    of_receivers = weighted_sum(receivers.dtype, edges, scales, senders, gradient)
    return None, None, of_senders, of_receivers


weighted_sum.defvjp(_sum_forward, _sum_backward)
edge_dot.defvjp(_dot_forward, _dot_backward)
