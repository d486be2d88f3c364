"""Parts of a transformer that compute in float32 and round their half-precision results only once, in chunks of tokens.

Written as separate operations, each would be rounded to half precision, under a policy as under autocast.
"""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jmp_train.policies import autocast_as, opaque_to_autocast, pvary

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
    return pvary(jnp.zeros(x.shape, _at_least_float32(x.dtype)), _axes(x))


def upcast(x: jax.Array) -> jax.Array:
    """Returns a half-precision array in float32, others unchanged; the cotangent is only rounded with the array's."""
    return x.astype(_at_least_float32(x.dtype))


def product(subscripts: str, *operands: jax.Array) -> jax.Array:
    """Returns `jnp.einsum` of operands of one dtype with unrounded sums, float32 for half-precision operands."""
    return jnp.einsum(subscripts, *operands, preferred_element_type=_at_least_float32(operands[0].dtype))


def _at_least_float32(dtype: Any) -> Any:
    return jnp.float32 if dtype.itemsize < 4 else dtype


def _axes(tree: Any) -> list[str]:
    return sorted({name for x in jax.tree.leaves(tree) for name in jax.typeof(x).manual_axis_type.varying})


def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up; only the operands are stored for the gradient.

    Args:
      gate: floating [...].
      up: floating [...], in the same dtype.

    Example:
      >>> gated(jnp.ones(1, jnp.bfloat16), jnp.ones(1, jnp.bfloat16))
      Array([0.730469], dtype=bfloat16)
    """
    return jax.checkpoint(opaque_to_autocast(_gated))(gate, up)


def _gated(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(upcast(gate)) * upcast(up)).astype(up.dtype)


def unrounded_product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns `x @ kernel` with unrounded sums, float32 for a half-precision kernel; the caller rounds later.

    Args:
      x: floating [batch, tokens, inputs]; rounded to the kernel's dtype.
      kernel: floating [inputs, outputs].

    Example:
      >>> unrounded_product(jnp.ones((1, 1, 1)), jnp.full((1, 1), 3, jnp.float16)).dtype.name
      'float32'
    """

    def run(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return _product(upcast(x), kernel)

    return opaque_to_autocast(run, contract=((2,), (0,)))(x, as_operand(kernel))


@autocast_as("lower")
def as_operand(x: jax.Array) -> jax.Array:
    """Returns the array as an operation that autocast casts to half precision, like an operand of a matrix product."""
    return x * jnp.ones((), x.dtype)  # an operation for autocast to cast; XLA removes it


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return product("bti,io->bto", x.astype(kernel.dtype), kernel)


def _forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x.astype(kernel.dtype), kernel)


def _backward(saved: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = saved
    cotangent = cotangent.astype(kernel.dtype)
    of_kernel = product("bti,bto->io", x, cotangent)
    return product("bto,io->bti", cotangent, kernel), of_kernel.astype(kernel.dtype)


_product.defvjp(_forward, _backward)
