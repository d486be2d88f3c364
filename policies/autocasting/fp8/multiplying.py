"""Products of quantized operands, by the units that a device has for them.

Operands in 8 bits are multiplied directly and the result is multiplied by both scales, so the compiler does not need to
find pairs of quantization and dequantization. On GPUs with 8-bit products, XLA computes one cuBLASLt product, on TPUs
with int8 units one of these. On other devices it multiplies in float32, with the same result, because float32 holds the
product of two 8-bit numbers exactly. Operands with scales within sums go to XLA's block-scaled product on NVIDIA GPUs,
which falls back to a plain one; elsewhere they are multiplied by their scales first, in bfloat16, on CPUs in float32.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.fp8.casting import Quantized, dequantized
from jmp_train.policies.autocasting.fp8.recipes import E4M3, E8M0
from jmp_train.policies.pytrees import vary_like

_BLOCKS_OF_GPUS = {E8M0: 32, E4M3: 16}  # by the dtype of the scales
_TERMS = 2**17  # of products of int8, whose sum is below 127**2 times as many: int32 holds it


def multiply(
    lhs: Quantized,
    rhs: Quantized,
    batch: int,
    contracted: int,
    dtype: DTypeLike,
    groups: jax.Array | None = None,
) -> jax.Array:
    """Returns a product; both operands have batch dimensions first, contracted ones last.

    Args:
      lhs: the first operand.
      rhs: the second operand.
      batch: the number of batch dimensions; 0 for a ragged product.
      contracted: the number of contracted dimensions.
      dtype: the dtype of the result.
      groups: of a ragged product, the sizes of the groups. With one more dimension than `lhs`, `rhs` has a matrix for
        each group of rows of `lhs`; otherwise, each group of terms has a result.

    Returns:
      The product: batch dimensions, those of lhs, those of rhs. One for groups of terms has the groups first.
    """
    dot = functools.partial(_dot, batch=batch, contracted=contracted, groups=groups)
    if lhs.blocks is not None:
        sums = _dot_blocks(lhs, rhs, batch, contracted, dot, is_ragged=groups is not None)
    elif lhs.array.dtype == jnp.int8:
        terms = math.prod(lhs.array.shape[lhs.array.ndim - contracted :])
        in_parts = functools.partial(_dot_in_parts, batch=batch, contracted=contracted, groups=groups)
        sums = in_parts(lhs.array, rhs.array) if terms > _TERMS else dot(lhs.array, rhs.array, dtype=jnp.int32)
    else:
        # Store bfloat16 results in bfloat16: XLA would otherwise keep the float32 sums for the backward pass.
        sums = dot(lhs.array, rhs.array, dtype=jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32)
    left, right = (x.inverse.reshape(x.inverse.shape[: x.inverse.ndim - contracted]) for x in (lhs, rhs))
    of_rows = groups is not None and rhs.array.ndim > lhs.array.ndim
    others = rhs.array.ndim - contracted - batch - of_rows  # of the dimensions of the result
    if groups is not None and of_rows and right.shape[0] > 1:
        group = jnp.searchsorted(jnp.cumsum(groups), jnp.arange(lhs.array.shape[0]), side="right")
        right = right.at[group].get(mode="clip")
    right = right if of_rows else jnp.expand_dims(right, range(batch, left.ndim))
    left = jnp.expand_dims(left, range(left.ndim, left.ndim + others))
    return restored(sums, left, right, dtype)


def restored(sums: jax.Array, left: jax.Array, right: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Returns sums of products of quantized operands, times what restores each operand, in a dtype."""
    # One after the other: the product of both may be no normal number. The smaller one first, against overflow.
    return (sums.astype(jnp.float32) * jnp.minimum(left, right) * jnp.maximum(left, right)).astype(dtype)


def _dot(
    lhs: jax.Array, rhs: jax.Array, *, batch: int, contracted: int, groups: jax.Array | None, dtype: DTypeLike
) -> jax.Array:
    """Returns the product of two arrays with sums in a dtype; see `multiply`."""
    contract = tuple(range(lhs.ndim - contracted, lhs.ndim)), tuple(range(rhs.ndim - contracted, rhs.ndim))
    batches = tuple(range(batch))
    exact = lax.Precision.HIGHEST if lhs.dtype == jnp.float32 else None
    if groups is None:
        return lax.dot_general(lhs, rhs, (contract, (batches, batches)), exact, preferred_element_type=dtype)
    of_rows = rhs.ndim > lhs.ndim
    numbers = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(contract, ((), ())),
        lhs_ragged_dimensions=(0 if of_rows else lhs.ndim - 1,),
        rhs_group_dimensions=(0,) if of_rows else (),
    )
    return lax.ragged_dot_general(lhs, rhs, groups, numbers, exact, preferred_element_type=dtype)


def _dot_in_parts(
    lhs: jax.Array, rhs: jax.Array, *, batch: int, contracted: int, groups: jax.Array | None
) -> jax.Array:
    """Returns the float32 product of int8 arrays with more terms than an int32 sum holds: such sums, added up."""
    lhs, rhs = (x.reshape(*x.shape[: x.ndim - contracted], -1) for x in (lhs, rhs))

    def part(start: int) -> jax.Array:
        left, right = (x[..., start : start + _TERMS] for x in (lhs, rhs))
        inside = groups
        if groups is not None and rhs.ndim == lhs.ndim:  # groups of terms
            inside = jnp.diff(jnp.clip(jnp.cumsum(groups) - start, 0, _TERMS), prepend=0).astype(groups.dtype)
        return _dot(left, right, batch=batch, contracted=1, groups=inside, dtype=jnp.int32).astype(jnp.float32)

    return functools.reduce(jnp.add, map(part, range(0, lhs.shape[-1], _TERMS)))


def _dot_blocks(
    lhs: Quantized, rhs: Quantized, batch: int, contracted: int, dot: Callable[..., Any], *, is_ragged: bool
) -> jax.Array:
    """Returns the float32 product of two arrays with scales of blocks."""
    codes: Any = lhs.blocks
    terms = lhs.array.shape[-1] // max(codes.shape[-1], 1)

    def multiplied_first(lhs: Quantized, rhs: Quantized) -> jax.Array:
        return dot(dequantized(lhs), dequantized(rhs), dtype=jnp.float32)

    def on_cpus(lhs: Quantized, rhs: Quantized) -> jax.Array:
        # XLA cannot run some products of bfloat16 with float32 results there, and others it widens itself.
        return dot(*(dequantized(x).astype(jnp.float32) for x in (lhs, rhs)), dtype=jnp.float32)

    def on_units(lhs: Quantized, rhs: Quantized) -> jax.Array:
        def flat(x: Any) -> jax.Array:
            parts = x.shape[:batch], x.shape[batch : x.ndim - contracted], x.shape[x.ndim - contracted :]
            return x.reshape(*map(math.prod, parts))

        parts = map(flat, (lhs.array, rhs.array, lhs.blocks, rhs.blocks))
        product = _scaled_matmul(*map(lax.stop_gradient, parts))  # jax has no derivative, and needs none of first order
        free = (x.array.shape[batch : x.array.ndim - contracted] for x in (lhs, rhs))
        shaped = product.reshape(*lhs.array.shape[:batch], *(size for sizes in free for size in sizes))
        return vary_like(lhs.array, shaped)  # jax's product forgets it

    is_known = _BLOCKS_OF_GPUS.get(codes.dtype) == terms and lhs.array.dtype == rhs.array.dtype
    units = {} if is_ragged or not is_known or not lhs.array.size or not rhs.array.size else {"cuda": on_units}
    return lax.platform_dependent(lhs, rhs, **units, cpu=on_cpus, default=multiplied_first)


@jax.custom_batching.custom_vmap
def _scaled_matmul(*arrays: jax.Array) -> jax.Array:
    return jax.nn.scaled_matmul(*arrays)


@_scaled_matmul.def_vmap
def _batched(size: int, is_batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
    """Adds the new dimension to the batch, also of arrays that do not have it, which jax's own rule refuses."""
    pairs = zip(arrays, is_batched, strict=True)
    full = [x if batched else jnp.broadcast_to(x, (size, *x.shape)) for x, batched in pairs]
    product = _scaled_matmul(*(x.reshape(size * x.shape[1], *x.shape[2:]) for x in full))
    return product.reshape(size, product.shape[0] // size, *product.shape[1:]), True
