"""Recipes with one scale per tensor: from the tensor itself, or from the largest magnitudes of previous steps."""

import dataclasses
from typing import Literal, get_args

from jmp_train.policies.autocasting.fp8.protocol import WHOLE, Fp8Format, Recipe
from jmp_train.policies.pytrees import check_choice

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
