"""Weighted sums of neighbours and products of both ends, by streaming: each is the other's gradient.

Both are custom gradients that save what they were given, in the dtype that it is stored in, and so every
order of reverse derivatives is again made of these two.
"""

import dataclasses
import functools
import math
from typing import Any

import jax

from jmp_train.graphs.neighbors import BothWays, Neighbors
from jmp_train.graphs.storage import common_dtype, wide_dtype
from jmp_train.graphs.streaming import Chunk, add_up, at, of_edges, wide_at


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scales:
    """What rows are multiplied by, without gradients of their own.

    Attributes:
      sources: floating [sources], before the rows are sent; None for 1.
      targets: floating [targets], after they were added; None for 1.
    """

    sources: jax.Array | None = None
    targets: jax.Array | None = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(
    dtype: Any, edges: BothWays, scales: Scales, data: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns the sums [targets, heads, width] of weights times the sources' rows, computed in float32.

    Args:
      dtype: the result's; None for that which data and weights promote to.
      edges: who sends to whom.
      scales: of the rows and sums.
      data: floating [sources, heads, width].
      weights: floating [edges, heads] or [edges, 1]; None for 1.
    """
    common = data.dtype if weights is None else common_dtype(data.dtype, weights.dtype)
    neighbors, shape = edges.by_target, data.shape[1:]

    def compute(chunk: Chunk) -> list[jax.Array]:
        factors = None if weights is None else edge_rows(neighbors, chunk, weights)
        if scales.sources is not None:
            scale = chunk.where_edge(chunk.of_others(scales.sources))[..., None]
            factors = scale if factors is None else factors * scale
        return [chunk.sum_of_others(data, factors)]

    like = [jax.ShapeDtypeStruct(shape, wide_dtype(common))]
    (sums,) = add_up(neighbors, compute, like, max(1, math.prod(shape)), data)
    if scales.targets is not None:
        sums = sums * scales.targets.astype(sums.dtype)[:, None, None]
    return sums.astype(common if dtype is None else dtype)


@jax.custom_vjp
def edge_dot(edges: BothWays, scales: Scales, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Returns the products [edges, heads] of the rows at both ends, summed over the width.

    Args:
      edges: who sends to whom.
      scales: of the rows at either end.
      sources: floating [sources, heads, width].
      targets: floating [targets, heads, width].

    Returns:
      The products, in the dtype that both promote to; 0 for edges that count nowhere.
    """
    dtype = common_dtype(sources.dtype, targets.dtype)
    neighbors = edges.by_target

    def compute(chunk: Chunk) -> jax.Array:
        products = chunk.dot_with_others(sources, targets)
        if scales.sources is not None:
            products = products * chunk.of_others(scales.sources)[..., None]
        if scales.targets is not None:
            products = products * chunk.of_nodes(scales.targets)[..., None]
        return products

    # XLA would copy all of a loop's bfloat16 array in each turn on CPUs: it is rounded in the end.
    like = jax.ShapeDtypeStruct(sources.shape[1:2], wide_dtype(dtype))
    numbers = max(1, neighbors.width * math.prod(sources.shape[1:]) // 2)
    return of_edges(neighbors, compute, like, numbers).astype(dtype)


def edge_rows(neighbors: Neighbors, chunk: Chunk, data: jax.Array) -> jax.Array:
    """Returns a chunk's rows [blocks, width, ...] of data [edges, ...], wide, 0 in empty places."""
    assert neighbors.edges is not None
    return chunk.where_edge(wide_at(data, at(neighbors.edges, chunk.positions)))


def _sum_forward(
    dtype: Any, edges: BothWays, scales: Scales, data: jax.Array, weights: jax.Array | None
) -> Any:
    return weighted_sum(dtype, edges, scales, data, weights), (edges, scales, data, weights)


def _sum_backward(dtype: Any, saved: Any, gradient: jax.Array) -> Any:
    del dtype
    edges, scales, data, weights = saved
    turned = Scales(scales.targets, scales.sources)
    of_data = weighted_sum(data.dtype, edges.reversed(), turned, gradient, weights)
    if weights is None:
        return None, None, of_data, None
    if weights.shape[1] == 1:  # all of a row is one head
        width = math.prod(data.shape[1:])
        data, gradient = (x.reshape(-1, 1, width) for x in (data, gradient))
    of_weights = edge_dot(edges, scales, data, gradient).astype(weights.dtype)
    return None, None, of_data, of_weights


def _dot_forward(edges: BothWays, scales: Scales, sources: jax.Array, targets: jax.Array) -> Any:
    return edge_dot(edges, scales, sources, targets), (edges, scales, sources, targets)


def _dot_backward(saved: Any, gradient: jax.Array) -> Any:
    edges, scales, sources, targets = saved
    turned = Scales(scales.targets, scales.sources)
    of_sources = weighted_sum(sources.dtype, edges.reversed(), turned, targets, gradient)
    of_targets = weighted_sum(targets.dtype, edges, scales, sources, gradient)
    return None, None, of_sources, of_targets


weighted_sum.defvjp(_sum_forward, _sum_backward)
edge_dot.defvjp(_dot_forward, _dot_backward)
