"""Recipes of 8-bit matrix products: the formats of the operands and the origin of the scales.

Names and defaults are those of Transformer Engine, `transformer_engine.common.recipe`.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

Fp8Format = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]

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
        _check_choice("fp8_format", self.fp8_format, Fp8Format)
        _check_choice("amax_compute_algo", self.amax_compute_algo, AmaxAlgorithm)
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

    def __post_init__(self) -> None:
        _check_choice("fp8_format", self.fp8_format, Fp8Format)


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

    def __post_init__(self) -> None:
        _check_choice("fp8_format", self.fp8_format, Fp8Format)


def _check_choice(name: str, value: object, kind: Any) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, get_args(kind)))}")


DEFAULT_RECIPE = Float8CurrentScaling()
