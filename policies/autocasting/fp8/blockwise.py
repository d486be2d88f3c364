"""Recipes with one scale per block of 128 or 32 numbers."""

import dataclasses

import jax.numpy as jnp

from jmp_train.policies.autocasting.fp8.protocol import E8M0, Fp8Format, Recipe, Scaling
from jmp_train.policies.pytrees import check_flag


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
