"""NVFP4: products of numbers in 4 bits."""

import dataclasses

from jmp_train.policies.autocasting.fp8.protocol import E2M1, E4M3, Recipe, Scaling
from jmp_train.policies.pytrees import check_flag


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
