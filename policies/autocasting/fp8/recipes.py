"""Recipes of 8-bit matrix products: which formats, and where the scales come from.

Names and defaults are Transformer Engine's, `transformer_engine.common.recipe`.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

Fp8Format = Literal["HYBRID", "E4M3"]
AmaxAlgorithm = Literal["max", "most_recent"]

E4M3, E5M2 = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


@dataclasses.dataclass(frozen=True)
class Float8CurrentScaling:
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

    @property
    def forward_dtype(self) -> Any:
        """The type of activations and weights."""
        return E4M3

    @property
    def backward_dtype(self) -> Any:
        """The type of gradients."""
        return E5M2 if self.fp8_format == "HYBRID" else E4M3


@dataclasses.dataclass(frozen=True)
class MXFP8BlockScaling(Float8CurrentScaling):
    """One scale, a power of two, for each 32 numbers that a product adds up; no state.

    An operand is quantized once for each product that it is in, along the dimension that is contracted there. Where
    the hardware has no products of such blocks, they run in bfloat16, which holds a number times its scale exactly.

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


Recipe = Float8CurrentScaling


def _check_choice(name: str, value: object, kind: Any) -> None:
    if value not in get_args(kind):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, get_args(kind)))}")


DEFAULT_RECIPE = Float8CurrentScaling()
