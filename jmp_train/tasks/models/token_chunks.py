"""Computes one chunk of a batch's tokens after the other, so that only one chunk's results are stored."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmp_train.policies.pytrees import at_least_float32, pvary

Tree = TypeVar("Tree")
LARGEST_CHUNK = 2**25  # elements of its results: 134 MB of float32


def chunk_length(tokens: int, elements_per_token: int, largest: int) -> int:
    """Returns the number of tokens per chunk: all, halved until the chunk is small enough or odd.

    Args:
      tokens: number of tokens per text.
      elements_per_token: number of result elements of one token in all texts.
      largest: largest number of elements per chunk.

    Example:
      >>> chunk_length(1024, 8 * 50_257, 2**25), chunk_length(1024, 8 * 256, 2**25), chunk_length(6, 100, 1)
      (64, 1024, 3)
    """
    while tokens * elements_per_token > largest and tokens % 2 == 0:
        tokens //= 2
    return tokens


def split(x: jax.Array, length: int) -> jax.Array:
    """Returns the tokens of an array [batch, tokens, ...] as [chunks, batch, length, ...].

    The batch axis stays whole, because it may be sharded.
    """
    return jnp.moveaxis(x.reshape(len(x), -1, length, *x.shape[2:]), 1, 0)


def joined(x: jax.Array) -> jax.Array:
    """Returns chunks [chunks, batch, length, ...] as [batch, tokens, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])


def vary_alike(tree: Tree) -> Tree:
    """Returns arrays that all vary over the same axes of a `shard_map`, as loops require."""
    return pvary(tree, _axes(tree))


def zeros_like_sums(x: jax.Array) -> jax.Array:
    """Returns zeros for a loop to add to: float32, with the array's shape and varying over the same mesh axes."""
    return pvary(jnp.zeros(x.shape, at_least_float32(x.dtype)), _axes(x))


def upcast(x: jax.Array) -> jax.Array:
    """Returns a half-precision array in float32, others unchanged; the cotangent is only rounded with the array's."""
    return x.astype(at_least_float32(x.dtype))


def product(subscripts: str, *operands: jax.Array) -> jax.Array:
    """Returns `jnp.einsum` of operands of one dtype with unrounded sums, float32 for half-precision operands."""
    return jnp.einsum(subscripts, *operands, preferred_element_type=at_least_float32(operands[0].dtype))


def _axes(tree: Any) -> list[str]:
    return sorted({name for x in jax.tree.leaves(tree) for name in jax.typeof(x).manual_axis_type.varying})
