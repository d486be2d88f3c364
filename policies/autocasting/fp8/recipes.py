"""Recipes: the types of operands, which of their numbers share a scale, and how gradients are rounded.

The code that scales, casts and multiplies reads them only through `Recipe`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

import jax.numpy as jnp

from jmp_train.policies.pytrees import check_choice, check_flag

Fp8Format = Literal["HYBRID", "E4M3"]

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)
E2M1, E8M0 = jnp.dtype(jnp.float4_e2m1fn), jnp.dtype(jnp.float8_e8m0fnu)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """Which numbers of an operand share a scale.

    Attributes:
      terms: the number of neighbors along the last contracted dimension; 0 for all terms of a sum.
      rows: the number of neighbors along the last other dimension, if `terms` is not 0.
      whole: True if all numbers share one scale; in a ragged product, those of a group.
      dtype: the dtype of scales: float32; float8_e8m0fnu, powers of two; or float8_e4m3fn, next to one float32 scale of
        the whole operand.
    """

    terms: int = 0
    rows: int = 1
    whole: bool = False
    dtype: Any = jnp.float32


WHOLE, ROWS = Scaling(whole=True), Scaling()


class Recipe:
    """The base class of recipes, which determine how operands of a product are quantized.

    Attributes:
      activations: which numbers of activations and gradients share a scale.
      fp8_format: "HYBRID", e4m3 forward and e5m2 for gradients, or "E4M3" for both.
      weights: which numbers of weights share a scale.
      forward_dtype: the dtype of activations and weights.
      backward_dtype: the dtype of gradients.
      stochastic: True if gradients are rounded stochastically.
      hadamard: True if a Hadamard transform spreads outliers of the operands of a weight gradient.

    Example:
      >>> from jmp_train.policies import Float8CurrentScaling
      >>> isinstance(Float8CurrentScaling(), Recipe)
      True
    """

    activations: Scaling = ROWS
    fp8_format: Fp8Format = "E4M3"
    forward_dtype: Any = E4M3
    stochastic: bool = False
    hadamard: bool = False

    def __post_init__(self) -> None:
        check_choice("fp8_format", self.fp8_format, get_args(Fp8Format))

    @property
    def holds(self) -> Any:
        """The floating dtype whose whole numbers all operands hold."""
        return E2M1 if self.forward_dtype == E2M1 else E4M3

    @property
    def weights(self) -> Scaling:
        """Which numbers of weights share a scale."""
        return self.activations

    @property
    def backward_dtype(self) -> Any:
        """The dtype of gradients."""
        return E5M2 if self.fp8_format == "HYBRID" else self.forward_dtype


AmaxAlgorithm = Literal["max", "most_recent"]


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
    activations = WHOLE

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
    activations = WHOLE


@dataclasses.dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """One scale for all numbers of an operand that are added to one result; no state.

    These are a row of activations, a column of weights, and in the gradients of both products the numbers that these
    add. An outlier costs the digits of its own row only.

    Args:
      fp8_format: "E4M3" for all arrays, or "HYBRID", with e5m2 for gradients.

    Raises:
      ValueError: there is no such format.

    Example:
      >>> Float8RowwiseScaling().backward_dtype.name
      'float8_e4m3fn'

    Reference: `Float8LinearRecipeName.ROWWISE` of torchao.
    """

    fp8_format: Fp8Format = "E4M3"


@dataclasses.dataclass(frozen=True)
class Int8RowwiseScaling(Recipe):
    """As `Float8RowwiseScaling`, in whole numbers from -127 to 127, whose products are added in int32; no state.

    TPUs v5e and v6e multiply int8 at twice the rate of bfloat16. A row with an infinity or NaN becomes NaN.

    Example:
      >>> Int8RowwiseScaling().forward_dtype.name
      'int8'

    Reference: AQT, https://github.com/google/aqt.
    """

    forward_dtype = jnp.dtype(jnp.int8)


@dataclasses.dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """One scale per 128 numbers of activations and gradients, and per 128 x 128 numbers of weights; no state.

    The 128 numbers are neighbors along the contracted dimension. With powers of two, products run in bfloat16, which
    holds a number times its scale exactly; otherwise in float32. They have the numerics of hardware with such products,
    but not its speed: adding one float8 product per 128 terms would move more bytes than it saves.

    Args:
      power_of_two: True for scales that are powers of two, False for float32 scales.
      fp8_format: "E4M3" for all arrays, or "HYBRID", with e5m2 for gradients.

    Raises:
      ValueError: an argument has an invalid value; the message names it.

    Example:
      >>> Float8BlockScaling().weights.rows
      128

    Reference: DeepSeek-AI, "DeepSeek-V3 Technical Report", https://arxiv.org/abs/2412.19437;
    `transformer_engine.common.recipe.Float8BlockScaling`.
    """

    power_of_two: bool = True
    fp8_format: Fp8Format = "E4M3"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_flag("power_of_two", self.power_of_two)

    @property
    def activations(self) -> Scaling:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Which numbers of activations and gradients share a scale."""
        return Scaling(128, dtype=E8M0 if self.power_of_two else jnp.float32)

    @property
    def weights(self) -> Scaling:
        """Which numbers of weights share a scale."""
        return dataclasses.replace(self.activations, rows=128)


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """One power-of-two scale per 32 numbers along the contracted dimension of a product; no state.

    An operand is quantized once per product, along the dimension that the product contracts. On GPUs with such
    products, of compute capability 10 and above, XLA computes them. Elsewhere they run in bfloat16, which holds a
    number times its scale exactly.

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
    activations = Scaling(32, dtype=E8M0)


@dataclasses.dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """Numbers in 4 bits (e2m1), with one e4m3 scale per 16 and one float32 scale per tensor; no state.

    The 16 numbers are neighbors along the contracted dimension; of weights, 16 x 16 numbers share a scale, so that both
    products with a weight see the same numbers. Gradients are rounded stochastically, with a key from the step's `rng`,
    the place of the product, its loop iteration and device, and the gradient itself. In the product that computes the
    gradient of a weight, a Hadamard transform of 16 numbers spreads outliers.

    Args:
      disable_rht: True for no Hadamard transform.
      disable_stochastic_rounding: True to round gradients to the nearest.
      disable_2d_quantization: True for scales of 16 numbers for weights too.

    Raises:
      ValueError: an argument is not a bool.

    Example:
      >>> recipe = NVFP4BlockScaling(disable_rht=True)
      >>> recipe.forward_dtype.name, recipe.stochastic, recipe.hadamard
      ('float4_e2m1fn', True, False)

    Reference: NVIDIA, "Pretraining Large Language Models with NVFP4", https://arxiv.org/abs/2509.25149;
    `transformer_engine.common.recipe.NVFP4BlockScaling`.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    activations = Scaling(16, dtype=E4M3)
    forward_dtype = E2M1

    def __post_init__(self) -> None:
        for field in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization"):
            check_flag(field, getattr(self, field))

    @property
    def weights(self) -> Scaling:
        """Which numbers of weights share a scale."""
        return dataclasses.replace(self.activations, rows=1 if self.disable_2d_quantization else 16)

    @property
    def stochastic(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether gradients are rounded stochastically."""
        return not self.disable_stochastic_rounding

    @property
    def hadamard(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Whether a Hadamard transform spreads outliers of the operands of a weight gradient."""
        return not self.disable_rht


RECIPES: Mapping[str, type[Recipe]] = {
    recipe.__name__: recipe
    for recipe in (
        *(Float8CurrentScaling, DelayedScaling, Float8RowwiseScaling, Float8BlockScaling),
        *(MXFP8BlockScaling, NVFP4BlockScaling, Int8RowwiseScaling),
    )
}
DEFAULT_RECIPE = Float8CurrentScaling()
