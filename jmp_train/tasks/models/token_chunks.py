"""What is computed for one chunk of a batch's tokens after the other, so that only a chunk's share of it is stored."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmp_train.policies.pytrees import at_least_float32, pvary

Tree = TypeVar("Tree")
LARGEST_CHUNK = 2**25  # elements of what is made of it: 134 MB of float32


def chunk_length(tokens: int, elements_per_token: int, largest: int) -> int:
    """Returns how many tokens a chunk has: all, halved until the chunk has so few elements or is odd.

    Args:
      tokens: of each of the batch's texts.
      elements_per_token: what is made of such a token in all texts.
      largest: elements.

    Example:
      >>> chunk_length(1024, 8 * 50_257, 2**25), chunk_length(1024, 8 * 256, 2**25), chunk_length(6, 100, 1)
      (64, 1024, 3)
    """
    while tokens * elements_per_token > largest and tokens % 2 == 0:
        tokens //= 2
    return tokens


def split(x: jax.Array, length: int) -> jax.Array:
    """Returns the tokens of an array [batch, tokens, ...] as [chunks, batch, length, ...].

    The batch stays whole, because it may be sharded.
    """
    return jnp.moveaxis(x.reshape(len(x), -1, length, *x.shape[2:]), 1, 0)


def joined(x: jax.Array) -> jax.Array:
    """Returns chunks [chunks, batch, length, ...] as [batch, tokens, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(len(x), -1, *x.shape[3:])


def vary_alike(tree: Tree) -> Tree:
    """Returns arrays which, within a `shard_map`, all vary over the axes over which one of them does, as loops want."""
    return pvary(tree, _axes(tree))


def zeros_like_sums(x: jax.Array) -> jax.Array:
    """Returns zeros of an array's shape for a loop to add to: float32, and varying over mesh axes as the array does."""
    return pvary(jnp.zeros(x.shape, at_least_float32(x.dtype)), _axes(x))


def upcast(x: jax.Array) -> jax.Array:
    """Returns an array in float32 if it is half; its cotangent is not rounded before the array's own is."""
    return x.astype(at_least_float32(x.dtype))


def product(subscripts: str, *operands: jax.Array) -> jax.Array:
    """Returns `jnp.einsum` of operands of one dtype with the sums as they are, float32 if the operands are half."""
    return jnp.einsum(subscripts, *operands, preferred_element_type=at_least_float32(operands[0].dtype))


def _axes(tree: Any) -> list[str]:
    return sorted({name for x in jax.tree.leaves(tree) for name in jax.typeof(x).manual_axis_type.varying})
