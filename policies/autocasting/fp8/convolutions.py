"""Convolutions in 8 bits, for recipes with one scale per tensor, with gradients that are convolutions in 8 bits too.

Operands are stored in 8 bits for the backward pass. The program converts them to bfloat16, on CPUs to float32, which
both hold them exactly. On GPUs with 8-bit products, XLA makes cuDNN's 8-bit convolutions of the forward ones; it has
none for the gradients, which are convolved in bfloat16.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.fp8.casting import Quantized, quantized
from jmp_train.policies.autocasting.fp8.multiplying import restored
from jmp_train.policies.autocasting.fp8.products import NOTHING, STORED, Extra, derived_once
from jmp_train.policies.autocasting.fp8.recipes import Recipe
from jmp_train.policies.pytrees import vary_like


@dataclasses.dataclass(frozen=True)
class ConvolutionSettings:
    """The static settings of a convolution.

    Attributes:
      recipe: the recipe by which operands are quantized.
      dtype: the dtype of the result.
      window: the other arguments of `lax.conv_general_dilated`, as pairs.
    """

    recipe: Recipe
    dtype: Any
    window: tuple[tuple[str, Any], ...]

    def run(self, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        """Convolves two arrays of one dtype."""
        return lax.conv_general_dilated(lhs, rhs, **dict(self.window))


def convolution_in_few_bits(
    lhs: jax.Array,
    rhs: jax.Array,
    params: Mapping[str, Any],
    recipe: Recipe,
    dtype: DTypeLike = jnp.float32,
    extra: Extra = NOTHING,
) -> jax.Array:
    """Returns a convolution computed in 8 bits; its gradients are computed so too.

    Args:
      lhs: floating array, the images.
      rhs: floating array, the kernel.
      params: the other arguments of `lax.conv_general_dilated`.
      recipe: a recipe with one scale per tensor.
      dtype: the dtype of the result.
      extra: the scales of delayed scaling.

    Returns:
      The convolution. Gradients have the dtypes of the operands.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train.policies import Float8CurrentScaling
      >>> x, w = jnp.array([[[7.0, 3.4]]]), jnp.full((1, 1, 1), 7.0)  # the scales are 64; 3.4 becomes 3.5
      >>> convolution_in_few_bits(x, w, {"window_strides": (1,), "padding": "VALID"}, Float8CurrentScaling())
      Array([[[49. , 24.5]]], dtype=float32)
    """
    window = {name: value for name, value in params.items() if name not in ("precision", "preferred_element_type")}
    convolution = ConvolutionSettings(recipe, jnp.dtype(dtype), tuple(sorted(window.items())))
    return _convolution(convolution, vary_like(rhs, lhs), vary_like(lhs, rhs), extra)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolution(convolution: ConvolutionSettings, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> jax.Array:
    return _forward(convolution, lhs, rhs, extra)[0]


def _forward(convolution: ConvolutionSettings, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> Any:
    recipe, dtype = convolution.recipe, convolution.dtype
    left, right = (_operand(recipe, x, i, recipe.forward_dtype, extra) for i, x in enumerate((lhs, rhs)))
    out = _convolved(convolution.run, left, right, dtype, dtype)
    like = [jnp.zeros((0,), x.dtype) for x in (lhs, rhs)]
    return out, (checkpoint_name((left, right), STORED), like)


def _derived(convolution: ConvolutionSettings, lhs: jax.Array, rhs: jax.Array, extra: Extra) -> Any:
    out, stored = _forward(convolution, derived_once(lhs), derived_once(rhs), extra)
    return out, (*stored, extra)


def _backward(convolution: ConvolutionSettings, residuals: Any, cotangent: jax.Array) -> Any:
    stored, like, extra = residuals
    # Otherwise XLA shares the forward pass's conversion from 8 bits, and keeps its bfloat16 result.
    left, right = lax.optimization_barrier(stored)
    of_out = _operand(convolution.recipe, derived_once(cotangent), 2, convolution.recipe.backward_dtype, extra)

    def for_left(gradient: jax.Array, kernel: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda x: convolution.run(x, kernel), left.array.astype(kernel.dtype))(gradient)[0]

    def for_right(gradient: jax.Array, images: jax.Array) -> jax.Array:
        return jax.linear_transpose(lambda w: convolution.run(images, w), right.array.astype(images.dtype))(gradient)[0]

    grads = (
        _convolved(for_left, of_out, right, convolution.dtype, like[0].dtype),
        _convolved(for_right, of_out, left, convolution.dtype, like[1].dtype),
    )
    scales = None if extra.scales is None else jnp.stack([left.amax, right.amax, of_out.amax])
    return *grads, Extra(scales)


_convolution.defvjp(_derived, _backward)


def _operand(recipe: Recipe, x: jax.Array, index: int, dtype: DTypeLike, extra: Extra) -> Quantized:
    """Quantizes the images, the kernel or the gradient, which are 0, 1 and 2."""
    scale = None if extra.scales is None else extra.scales[index]
    return quantized(x, x.ndim, recipe.activations, dtype, scale=scale)


def _convolved(
    run: Callable[..., jax.Array], lhs: Quantized, rhs: Quantized, of_sums: DTypeLike, dtype: DTypeLike
) -> jax.Array:
    """Returns a convolution, or its transpose, of two operands, with sums in bfloat16 or float32."""

    def sums_in(floats: DTypeLike) -> Callable[..., jax.Array]:
        return lambda *arrays: run(*(x.astype(floats) for x in arrays)).astype(jnp.float32)

    exact = sums_in(jnp.float32)
    default = sums_in(jnp.bfloat16) if of_sums == jnp.bfloat16 else exact
    sums = lax.platform_dependent(lhs.array, rhs.array, cpu=exact, default=default)
    left, right = (x.inverse.reshape((1,) * sums.ndim) for x in (lhs, rhs))
    return restored(sums, left, right, dtype)
