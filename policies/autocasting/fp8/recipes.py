"""Recipes of 8-bit matrix products: which formats, and where the scales come from.

Names and defaults are Transformer Engine's, `transformer_engine.common.recipe`.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

Fp8Format = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Recipe:
    """How operands of a product are quantized: what all recipes have.

    Attributes:
      fp8_format: "HYBRID", e4m3 forward and e5m2 for gradients, or "E4M3" for both.

    Example:
      >>> isinstance(Float8CurrentScaling(), Recipe)
      True
    """

    fp8_format: Fp8Format

    @property
    def forward_dtype(self) -> Any:
        """The type of activations and weights."""
        return E4M3

    @property
    def backward_dtype(self) -> Any:
        """The type of gradients."""
        return E5M2 if self.fp8_format == "HYBRID" else E4M3


@dataclasses.dataclass(frozen=True)
class DelayedScaling(Recipe):
    """One scale for each operand of a product, from its largest magnitudes in the steps before; `train_step` keeps it.

    An operand is quantized in one pass over it, since its scale is known before. `with_fp8_state` makes the state of
    the scales and histories, which is a part of the model state. All micro-batches of a step, devices and uses within
    loops share a scale, and the largest of their magnitudes enters the history; a skipped step enters nothing. Where
    there is no state, in evaluation or outside of `train_step`, it is `Float8CurrentScaling`.

    Args:
      margin: scales are divided by 2 to the power of it.
      fp8_format: "HYBRID", e4m3 forward and e5m2 for gradients, or "E4M3" for both.
      amax_history_len: how many steps a history has.
      amax_compute_algo: "max" takes the largest magnitude of the history, "most_recent" that of the last step.

    Raises:
      ValueError: an argument is none of these; the message names it.

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
    """One scale for each operand of a product, from its own largest magnitude; no state.

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
    """One scale, a power of two, for each 32 numbers that a product adds up; no state.

    An operand is quantized once for each product that it is in, along the dimension that is contracted there. The
    products of blocks run in float32, which holds a number times its scale exactly, as does a GPU's TF32: they have the
    numerics of hardware with such products, not its speed.

    Args:
      fp8_format: "E4M3" for all, or "HYBRID", which has e5m2 for gradients.

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
