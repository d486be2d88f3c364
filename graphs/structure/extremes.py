"""Extremes whose gradients reach what was reduced, however XLA rounds it.

XLA may compute an operand of two operations twice, and contract one of the products to a fused multiply-add: then no
element equals the extreme. jax's own gradients of `max` would be 0 or NaN.
"""

import functools

import jax
import jax.numpy as jnp


@jax.custom_jvp
def computed_once(data: jax.Array) -> jax.Array:
    """Returns data to scatter, of which the gradient may tell which are the largest of their segment.

    GPUs compute what is behind a barrier once; CPUs what is scattered.
    """
    return data


computed_once.defjvp(lambda data, tangents: (jax.lax.optimization_barrier(*data), tangents[0]))


def are_largest(data: jax.Array, axis: int) -> jax.Array:
    """Returns a mask of the data that are the largest along an axis: at least one, found in one pass; NaN is NaN."""
    winner = jnp.argmax(data, axis, keepdims=True)
    is_winner = jax.lax.broadcasted_iota(winner.dtype, data.shape, axis % data.ndim) == winner
    return is_winner | equal_or_nan(data, data.max(axis, keepdims=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def largest_over(data: jax.Array, axis: int) -> jax.Array:
    """Returns the largest data along an axis, which share the gradient equally."""
    return data.max(axis)


@largest_over.defjvp
def _largest_tangent(axis: int, data: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    is_largest, (slope,) = are_largest(jax.lax.stop_gradient(data[0]), axis), tangents
    count = is_largest.sum(axis, dtype=jnp.int32).astype(slope.dtype)
    return largest_over(data[0], axis), jnp.where(is_largest, slope, jnp.zeros_like(slope)).sum(axis) / count


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def extreme_of_two(is_max: bool, left: jax.Array, right: jax.Array) -> jax.Array:
    """Returns the larger or the smaller of two numbers, with half the gradient of each if they are equal."""
    return jnp.maximum(left, right) if is_max else jnp.minimum(left, right)


@extreme_of_two.defjvp
def _tangent_of_two(
    is_max: bool, data: tuple[jax.Array, jax.Array], tangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (left, right), (of_left, of_right) = data, tangents
    is_left, is_right = (left > right, left < right) if is_max else (left < right, left > right)
    slope = jnp.where(is_left, of_left, jnp.where(is_right, of_right, (of_left + of_right) / 2))
    return extreme_of_two(is_max, left, right), slope


def equal_or_nan(data: jax.Array, wanted: jax.Array) -> jax.Array:
    """Returns where data are equal to `wanted`, or both are NaN."""
    return (data == wanted) | (jnp.isnan(data) & jnp.isnan(wanted))
