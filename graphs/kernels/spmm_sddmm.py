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

from jmp_train.graphs.kernels.chunks import Chunk, add_up, at, of_edges, upcast_at
from jmp_train.graphs.kernels.native_calls import Scales, native_dot, native_sum, on_cpus, takes
from jmp_train.graphs.structure import CSR, CSRAndCSC, accumulation_dtype, common_dtype


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
    arguments = edges.by_target, scales, data, weights
    if not takes(dtype, *arguments):
        return chunked(*arguments)
    return on_cpus(functools.partial(native_sum, dtype), chunked, *arguments)


def _chunked_sum(
    dtype: DTypeLike, neighbors: CSR, scales: Scales, data: jax.Array, weights: jax.Array | None
) -> jax.Array:
    common = data.dtype if weights is None else common_dtype(data.dtype, weights.dtype)
    shape = data.shape[1:]

    def compute(chunk: Chunk) -> list[jax.Array]:
        factors = None if weights is None else edge_rows(neighbors, chunk, weights)
        if scales.senders is not None:
            scale = chunk.where_edge(chunk.of_others(scales.senders))[..., None]
            factors = scale if factors is None else factors * scale
        return [chunk.sum_of_others(data, factors)]

    like = [jax.ShapeDtypeStruct(shape, accumulation_dtype(common))]
    (sums,) = add_up(neighbors, compute, like, max(1, math.prod(shape)), data)
    if scales.receivers is not None:
        sums = sums * scales.receivers.astype(sums.dtype)[:, None, None]
    return sums.astype(dtype)


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
    arguments = edges.by_target, scales, senders, receivers
    if not takes(senders.dtype, *arguments):
        return _chunked_dot(*arguments)
    return on_cpus(native_dot, _chunked_dot, *arguments)


def _chunked_dot(neighbors: CSR, scales: Scales, senders: jax.Array, receivers: jax.Array) -> jax.Array:
    dtype = common_dtype(senders.dtype, receivers.dtype)

    def compute(chunk: Chunk) -> jax.Array:
        products = chunk.dot_with_others(senders, receivers)
        if scales.senders is not None:
            products = products * chunk.of_others(scales.senders)[..., None]
        if scales.receivers is not None:
            products = products * chunk.of_nodes(scales.receivers)[..., None]
        return products

    # XLA would copy all of a loop's bfloat16 array in each iteration on CPUs: it is rounded in the end.
    like = jax.ShapeDtypeStruct(senders.shape[1:2], accumulation_dtype(dtype))
    elements = max(1, neighbors.width * math.prod(senders.shape[1:]) // 2)
    return of_edges(neighbors, compute, like, elements).astype(dtype)


def edge_rows(neighbors: CSR, chunk: Chunk, data: jax.Array) -> jax.Array:
    """Returns a chunk's rows [blocks, width, ...] of data [edges, ...], upcast, 0 in empty places."""
    return chunk.where_edge(upcast_at(data, at(neighbors.edge_ids, chunk.positions)))


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
