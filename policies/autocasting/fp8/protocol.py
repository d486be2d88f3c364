"""What a recipe decides: the types of operands, which of their numbers share a scale, and how gradients are rounded.

The code that scales, casts and multiplies reads recipes only through this protocol.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax.numpy as jnp

from jmp_train.policies.pytrees import check_choice

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
