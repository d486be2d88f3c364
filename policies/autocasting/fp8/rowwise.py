"""Recipes with one scale per row of activations and per column of weights."""

import dataclasses

import jax.numpy as jnp

from jmp_train.policies.autocasting.fp8.protocol import Fp8Format, Recipe


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
