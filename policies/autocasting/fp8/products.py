"""Matrix products in 8 bits, with gradients that are products in 8 bits too.

Operands are quantized and multiplied directly, float8 by float8, with sums in float32. The result is divided by both
scales. The compiler does not need to find pairs of quantization and dequantization. On GPUs with 8-bit products, XLA
computes one cuBLASLt product. On other devices it multiplies in float32, with the same result, because float32 holds
the product of two 8-bit numbers exactly.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.fp8.recipes import (
    MXFP8BlockScaling,
    Recipe,
    amax_of,
    dequantize_blocks,
    quantize,
    quantize_blocks,
    scale_of,
)

Contract = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions of lhs and of rhs, in pairs

_LARGEST_SCALE = 2.0**126  # whose inverse is a normal number; XLA's CPU compiler flushes others to 0


def operand_gradients(
    contract: Contract,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    for_lhs: Callable[[Contract], Any],
    for_rhs: Callable[[Contract], Any],
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands of a product without batch dimensions.

    Args:
      contract: the contracted dimensions of the product. Its result has the free dimensions of lhs, then those of rhs.
      shapes: the shapes of lhs and rhs.
      for_lhs: multiplies the cotangent by rhs along the given dimensions.
      for_rhs: multiplies the cotangent by lhs along the given dimensions.
    """
    lhs_contract, rhs_contract = contract
    lhs_free, rhs_free = (_others(len(s), dims) for s, dims in zip(shapes, contract, strict=True))
    of_lhs = tuple(range(len(lhs_free)))  # dimensions of the cotangent
    of_rhs = tuple(range(len(lhs_free), len(lhs_free) + len(rhs_free)))
    return (
        _like(for_lhs((of_rhs, rhs_free)), lhs_free, lhs_contract, rhs_contract),
        _like(for_rhs((of_lhs, lhs_free)), rhs_free, rhs_contract, lhs_contract),
    )


def _others(count: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i not in dimensions)


def _like(grads: Any, free: tuple[int, ...], contract: tuple[int, ...], partners: tuple[int, ...]) -> jax.Array:
    """Returns gradients with an operand's order of dimensions; they come free first, then in the partner's order."""
    order = [contract[partners.index(partner)] for partner in sorted(partners)]
    return jnp.transpose(grads, np.argsort([*free, *order]).tolist())


@dataclasses.dataclass(frozen=True)
class Product:
    """The static settings of a product.

    Attributes:
      recipe: the recipe by which operands are quantized.
      contract: the contracted dimensions of lhs and of rhs, in pairs; there are no batch dimensions.
      dtype: the dtype of the result.
    """

    recipe: Recipe
    contract: Contract
    dtype: Any


class Quantized(NamedTuple):
    """An operand in 8 bits.

    Attributes:
      array: 8-bit, of the operand's shape.
      inverse_scale: float32 scalar, the factor that restores the operand.
      amax: float32 scalar, the operand's largest magnitude.
    """

    array: jax.Array
    inverse_scale: jax.Array
    amax: jax.Array


def fp8_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    contract: Contract,
    recipe: Recipe,
    dtype: DTypeLike = jnp.float32,
    scales: jax.Array | None = None,
) -> jax.Array:
    """Returns a matrix product computed in 8 bits; its gradients are computed in 8 bits too.

    Args:
      lhs: floating array.
      rhs: floating array.
      contract: the contracted dimensions of lhs and of rhs, in pairs.
      recipe: the recipe by which they are quantized.
      dtype: the dtype of the result.
      scales: float32 [3], the scales of lhs, rhs and the gradient of the result; None to compute them from the arrays.

    Returns:
      The product. Gradients have the dtypes of the operands; their sums are float32. The "gradients" of `scales` are
      the largest magnitudes of lhs, rhs and the gradient of the result.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.policies import Float8CurrentScaling
      >>> x, w = jnp.array([[7.0, 3.4]]), jnp.array([[7.0], [7.0]])
      >>> fp8_dot(x, w, ((1,), (0,)), Float8CurrentScaling())  # the scales are 64; 3.4 becomes 3.5
      Array([[73.5]], dtype=float32)
    """
    product = Product(recipe, contract, jnp.dtype(dtype))
    if isinstance(recipe, MXFP8BlockScaling):
        return _of_blocks(product, lhs, rhs)
    return _of_tensors(product, lhs, rhs, scales)


def _quantized(x: jax.Array, dtype: DTypeLike, scales: jax.Array | None, index: int) -> Quantized:
    amax = amax_of(x)
    scale = scale_of(amax, dtype) if scales is None else scales[index]
    scale = jnp.minimum(scale, _LARGEST_SCALE)
    return Quantized(quantize(x, dtype, scale), 1.0 / scale, amax)


def _multiply(lhs: Quantized, rhs: Quantized, contract: Contract, dtype: DTypeLike) -> jax.Array:
    # Store bfloat16 results in bfloat16: XLA would otherwise keep the float32 sums for the backward pass.
    stored = jnp.bfloat16 if dtype == jnp.bfloat16 else jnp.float32
    sums = lax.dot_general(lhs.array, rhs.array, (contract, ((), ())), preferred_element_type=stored)
    # One after the other: the product of both may be no normal number. The smaller one first, against overflow.
    inverses = lhs.inverse_scale, rhs.inverse_scale
    restored = sums.astype(jnp.float32) * jnp.minimum(*inverses) * jnp.maximum(*inverses)
    return restored.astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_tensors(product: Product, lhs: jax.Array, rhs: jax.Array, scales: jax.Array | None) -> jax.Array:
    return _forward_of_tensors(product, lhs, rhs, scales)[0]


def _forward_of_tensors(product: Product, lhs: jax.Array, rhs: jax.Array, scales: jax.Array | None) -> Any:
    left, right = (_quantized(x, product.recipe.forward_dtype, scales, i) for i, x in enumerate((lhs, rhs)))
    like = [jnp.zeros((0,), x.dtype) for x in (lhs, rhs)]
    return _multiply(left, right, product.contract, product.dtype), (left, right, like, scales)


def _backward_of_tensors(product: Product, residuals: Any, cotangent: jax.Array) -> Any:
    lhs, rhs, like, scales = residuals
    gradient = _quantized(cotangent, product.recipe.backward_dtype, scales, 2)
    grads = operand_gradients(
        product.contract,
        (lhs.array.shape, rhs.array.shape),
        lambda contract: _multiply(gradient, rhs, contract, like[0].dtype),
        lambda contract: _multiply(gradient, lhs, contract, like[1].dtype),
    )
    return *grads, None if scales is None else jnp.stack([lhs.amax, rhs.amax, gradient.amax])


_of_tensors.defvjp(_forward_of_tensors, _backward_of_tensors)


def _in_blocks(x: jax.Array, dimensions: tuple[int, ...], dtype: DTypeLike) -> jax.Array:
    """Returns an array quantized along its last contracted dimension, and dequantized."""
    last = dimensions[-1]
    return dequantize_blocks(*quantize_blocks(x, last, dtype), last)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _of_blocks(product: Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _forward_of_blocks(product, lhs, rhs)[0]


def _multiply_blocks(
    lhs: jax.Array, rhs: jax.Array, dtypes: tuple[Any, Any], contract: Contract, dtype: DTypeLike
) -> jax.Array:
    # Pairs of contracted dimensions are in the same order, so blocks of both operands cover the same indices.
    left, right = (_in_blocks(x, dims, dtype) for x, dims, dtype in zip((lhs, rhs), contract, dtypes, strict=True))
    return lax.dot_general(left, right, (contract, ((), ())), preferred_element_type=jnp.float32).astype(dtype)


def _forward_of_blocks(product: Product, lhs: jax.Array, rhs: jax.Array) -> Any:
    forward = product.recipe.forward_dtype
    return _multiply_blocks(lhs, rhs, (forward, forward), product.contract, product.dtype), (lhs, rhs)


def _backward_of_blocks(product: Product, operands: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
    lhs, rhs = operands
    dtypes = product.recipe.backward_dtype, product.recipe.forward_dtype
    return operand_gradients(
        product.contract,
        (lhs.shape, rhs.shape),
        lambda contract: _multiply_blocks(cotangent, rhs, dtypes, contract, lhs.dtype),
        lambda contract: _multiply_blocks(cotangent, lhs, dtypes, contract, rhs.dtype),
    )


_of_blocks.defvjp(_forward_of_blocks, _backward_of_blocks)
