"""Recipes of 8-bit matrix products, and the saturating casts and scales of their operands.

A recipe decides the formats of the operands and the origin of the scales, which use the full range of a type. Names
and defaults are those of Transformer Engine, `transformer_engine.common.recipe`.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies.pytrees import check_choice

Fp8Format = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]

BLOCK = 32  # how many numbers share a scale in the MX formats
_EXPONENT_BIAS, _MANTISSA_BITS = 127, 23  # of float32

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Recipe:
    """The base class of recipes, which determine how operands of a product are quantized.

    Attributes:
      fp8_format: "HYBRID", e4m3 forward and e5m2 for gradients, or "E4M3" for both.

    Example:
      >>> isinstance(Float8CurrentScaling(), Recipe)
      True
    """

    fp8_format: Fp8Format

    def __post_init__(self) -> None:
        check_choice("fp8_format", self.fp8_format, get_args(Fp8Format))

    @property
    def forward_dtype(self) -> Any:
        """The dtype of activations and weights."""
        return E4M3

    @property
    def backward_dtype(self) -> Any:
        """The dtype of gradients."""
        return E5M2 if self.fp8_format == "HYBRID" else E4M3


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale per operand of a product, from its largest magnitudes in previous steps.

    An operand is quantized in one pass, because its scale is known in advance. `with_fp8_state` adds the scales and
    histories to the model state, and `train_step` updates them. All micro-batches of a step, devices and uses within
    loops share a scale, and the largest of their magnitudes enters the history. A skipped step adds nothing to the
    history. Without a state, in evaluation or outside of `train_step`, the recipe behaves like `Float8CurrentScaling`.

    Args:
      margin: scales are divided by `2**margin`.
      fp8_format: "HYBRID", e4m3 forward and e5m2 for gradients, or "E4M3" for both.
      amax_history_len: the number of steps in a history.
      amax_compute_algo: "max" uses the largest magnitude in the history, "most_recent" that of the last step.

    Raises:
      ValueError: an argument has an invalid value; the message names it.

    Example:
      >>> DelayedScaling()
      DelayedScaling(margin=0, fp8_format='HYBRID', amax_history_len=1024, amax_compute_algo='max')

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433;
    `transformer_engine.common.recipe.DelayedScaling`.
    """

    margin: int = 0
    fp8_format: Fp8Format = "HYBRID"
    amax_history_len: int = 1024
    amax_compute_algo: AmaxAlgorithm = "max"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("amax_compute_algo", self.amax_compute_algo, get_args(AmaxAlgorithm))
        if not isinstance(self.amax_history_len, int) or self.amax_history_len < 1:
            raise ValueError(f"amax_history_len={self.amax_history_len!r} must be an integer of at least 1")
        if not isinstance(self.margin, int):
            raise ValueError(f"margin={self.margin!r} must be an integer")


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """One scale per operand of a product, from its own largest magnitude; no state.

    Args:
      fp8_format: "HYBRID", e4m3 forward and e5m2 for gradients, or "E4M3" for both.

    Raises:
      ValueError: there is no such format.

    Example:
      >>> recipe = Float8CurrentScaling()
      >>> recipe.forward_dtype.name, recipe.backward_dtype.name
      ('float8_e4m3fn', 'float8_e5m2')

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433;
    `transformer_engine.common.recipe.Float8CurrentScaling`.
    """

    fp8_format: Fp8Format = "HYBRID"


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale per 32 numbers along the contracted dimension of a product; no state.

    An operand is quantized once per product, along the dimension that the product contracts. The products of blocks run
    in float32, which holds a number times its scale exactly, as does the TF32 of GPUs. They have the numerics of
    hardware with such products, but not its speed.

    Args:
      fp8_format: "E4M3" for all arrays, or "HYBRID", with e5m2 for gradients.

    Raises:
      ValueError: there is no such format.

    Example:
      >>> MXFP8BlockScaling().backward_dtype.name
      'float8_e4m3fn'

    Reference: OCP Microscaling Formats (MX) Specification 1.0; Rouhani et al., "Microscaling Data Formats for Deep
    Learning", https://arxiv.org/abs/2310.10537; `transformer_engine.common.recipe.MXFP8BlockScaling`.
    """

    fp8_format: Fp8Format = "E4M3"


DEFAULT_RECIPE = Float8CurrentScaling()


def quantize(x: jax.Array, dtype: DTypeLike, scale: ArrayLike = 1.0) -> jax.Array:
    """Returns an array times a scale, rounded to the nearest value of an 8-bit type, ties to even.

    Args:
      x: floating array.
      dtype: float8_e4m3fn, which has no infinity, or float8_e5m2.
      scale: finite and positive, with a shape that broadcasts to the shape of `x`.

    Returns:
      The quantized array. Finite numbers beyond the type's range become its largest number of the same sign. Infinities
      become NaN in both types, and NaN stays NaN, so that a loss scale can detect an overflow.

    Example:
      >>> import jax.numpy as jnp
      >>> quantize(jnp.array([1.1, 1000.0, -jnp.inf]), jnp.float8_e4m3fn).astype(jnp.float32)
      Array([  1.125, 448.   ,     nan], dtype=float32)

    Reference: Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433.
    """
    most = float(jnp.finfo(dtype).max)
    scaled = jnp.clip(x.astype(jnp.float32) * scale, -most, most)
    return jnp.where(jnp.isfinite(x), scaled, jnp.nan).astype(dtype)


def amax_of(x: jax.Array) -> jax.Array:
    """Returns the largest magnitude in an array as a float32 scalar: NaN if the array has NaN, 0 if it is empty."""
    return jnp.max(jnp.abs(x), initial=0.0).astype(jnp.float32)


def scale_of(amax: jax.Array, dtype: DTypeLike, margin: int = 0, old: ArrayLike = 1.0) -> jax.Array:
    """Returns the scale that maps the largest magnitude to the largest number of a type.

    Args:
      amax: float32 array of largest magnitudes.
      dtype: an 8-bit type.
      margin: the scale is divided by `2**margin`.
      old: the scale to use where `amax` is 0, infinite or NaN.

    Returns:
      float32 array of the shape of `amax`: (largest number of the type / amax) / 2**margin, at most the largest number
      of float32.

    Example:
      >>> import jax.numpy as jnp
      >>> scale_of(jnp.array([2.0, 0.0, jnp.inf]), jnp.float8_e4m3fn, margin=1, old=4.0)
      Array([112.,   4.,   4.], dtype=float32)

    Reference: `compute_scale_from_amax` of Transformer Engine.
    """
    usable = (amax > 0) & jnp.isfinite(amax)
    scale = float(jnp.finfo(dtype).max) / jnp.where(usable, amax, 1.0) / 2.0**margin
    return jnp.where(usable, jnp.minimum(scale, float(jnp.finfo(jnp.float32).max)), old)


def quantize_blocks(x: jax.Array, dimension: int, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Returns an array in an 8-bit type with one power-of-two scale per 32 numbers along a dimension.

    Args:
      x: floating array.
      dimension: the dimension that is split into blocks. The last block may have fewer than 32 numbers.
      dtype: an 8-bit type.

    Returns:
      The quantized array, with the shape of `x`, and one float8_e8m0fnu scale per block. The numbers of a block times
      its scale approximate `x`. The scale is the smallest that clips no number, and at least 2**-126.

    Example:
      >>> import jax.numpy as jnp
      >>> quantized, scales = quantize_blocks(jnp.array([896.0, 1.0] + 30 * [0.0] + [448.0]), 0, jnp.float8_e4m3fn)
      >>> scales.astype(jnp.float32), float(quantized[0])
      (Array([2., 1.], dtype=float32), 448.0)

    Reference: OCP Microscaling Formats (MX) Specification 1.0; Mishra et al., "Recipes for Pre-training LLMs with
    MXFP8", https://arxiv.org/abs/2506.08027, for rounding the scale up.
    """
    blocks = _in_blocks(x.astype(jnp.float32), dimension)
    amax = jnp.max(jnp.abs(blocks), axis=dimension + 1)
    ratio = lax.bitcast_convert_type(amax / float(jnp.finfo(dtype).max), jnp.uint32)
    exponent, mantissa = (ratio >> _MANTISSA_BITS) & 0xFF, ratio & (1 << _MANTISSA_BITS) - 1
    exponent += (mantissa > 0).astype(jnp.uint32)
    exponent = jnp.maximum(exponent, 1)  # XLA's CPU compiler flushes subnormal scales to 0
    exponent = jnp.where(jnp.isfinite(amax), exponent, _EXPONENT_BIAS)
    factor = lax.bitcast_convert_type(2 * _EXPONENT_BIAS - exponent << _MANTISSA_BITS, jnp.float32)
    quantized = quantize(blocks, dtype, jnp.expand_dims(factor, dimension + 1))
    whole = quantized.reshape(*x.shape[:dimension], -1, *x.shape[dimension + 1 :])
    scales = lax.bitcast_convert_type(exponent.astype(jnp.uint8), jnp.float8_e8m0fnu)
    return lax.slice_in_dim(whole, 0, x.shape[dimension], axis=dimension), scales


def dequantize_blocks(quantized: jax.Array, scales: jax.Array, dimension: int) -> jax.Array:
    """Returns the values that `quantize_blocks` encodes, in float32: exact unless they underflow.

    Args:
      quantized: the 8-bit array.
      scales: the scales of its blocks.
      dimension: the dimension that is split into blocks.

    Example:
      >>> import jax.numpy as jnp
      >>> dequantize_blocks(*quantize_blocks(jnp.array([3.0, 900.0]), 0, jnp.float8_e4m3fn), 0)
      Array([  3., 896.], dtype=float32)
    """
    of_each = jnp.repeat(scales.astype(jnp.float32), BLOCK, axis=dimension)
    of_each = lax.slice_in_dim(of_each, 0, quantized.shape[dimension], axis=dimension)
    return quantized.astype(jnp.float32) * of_each


def _in_blocks(x: jax.Array, dimension: int) -> jax.Array:
    """Returns an array with a dimension split into two, blocks and their numbers; zeros pad the last block."""
    missing = -x.shape[dimension] % BLOCK
    filled = lax.pad(x, jnp.zeros((), x.dtype), [(0, missing if i == dimension else 0, 0) for i in range(x.ndim)])
    return filled.reshape(*x.shape[:dimension], -1, BLOCK, *x.shape[dimension + 1 :])
