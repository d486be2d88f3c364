"""Emulated float64 product: float32(float64(x) * factor) without float64, bitwise.

torch multiplies its float32 scale by a double factor and rounds twice, to double and to float32.
jax computes in float32 unless float64 is enabled for the whole program. For decimal factors the two
often differ: in one case of ten, 0.7 times a float lies halfway between two floats up to the error of 0.7 itself.
So this module computes the product in integers.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np

_DIGIT_BITS = 12
_DIGIT = np.uint32(2**_DIGIT_BITS - 1)


def float64_product(x: jax.Array, factor: float) -> jax.Array:
    """Returns x times a Python float, rounded to double and then to float32, as in C.

    Args:
      x: float32, zero or normal and positive; any shape.
      factor: a positive double.

    Returns:
      float32 of the shape of `x`.

    Example:
      >>> import jax.numpy as jnp
      >>> float(float64_product(jnp.float32(3.0), 0.7)) == float(np.float32(3.0 * 0.7))
      True
    """
    if float(np.float32(factor)) == factor:
        return x * np.float32(factor)  # exact in double precision, so it is rounded only once
    fraction, factor_exponent = math.frexp(factor)
    factor_integer = int(math.ldexp(fraction, 53))
    fraction, exponent = jnp.frexp(x)
    integer = (fraction * np.float32(2**24)).astype(jnp.uint32)
    # Doubled if needed, so that the product has 77 bits: 53 for the double, and 24 to round off.
    small = integer < np.uint32(math.ceil(2**76 / factor_integer))
    digits = _digits_of_product(jnp.where(small, 2 * integer, integer), factor_integer)
    high, low = _round_to_double(digits)
    high += _rounds_up(low, 29, high)
    scaled = jnp.ldexp(high.astype(jnp.float32) * np.float32(2.0**-24), exponent + factor_exponent)
    return jnp.where(jnp.isfinite(x), jnp.where(small, scaled * np.float32(0.5), scaled), x)


def _digits_of_product(integer: jax.Array, factor: int) -> list[jax.Array]:
    """Returns the 7 digits of 12 bits, lowest first, of a product of 25 and 53 bits."""
    low, high = integer & _DIGIT, integer >> np.uint32(_DIGIT_BITS)
    columns = [jnp.zeros_like(integer) for _ in range(7)]
    for i in range(5):
        digit = np.uint32((factor >> (_DIGIT_BITS * i)) & int(_DIGIT))
        columns[i] += low * digit
        columns[i + 1] += high * digit
    carry = jnp.zeros_like(integer)
    for i, column in enumerate(columns):
        columns[i] = (column + carry) & _DIGIT
        carry = (column + carry) >> np.uint32(_DIGIT_BITS)
    return columns


def _round_to_double(digits: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns the double nearest to the product: its first 24 bits, and its last 29."""
    d0, d1, d2, d3, d4, d5, d6 = digits
    low = d2 | d3 << np.uint32(12) | (d4 & np.uint32(31)) << np.uint32(24)
    high = d4 >> np.uint32(5) | d5 << np.uint32(7) | d6 << np.uint32(19)
    low += _rounds_up(d0 | d1 << np.uint32(12), 24, low)
    return high + (low >> np.uint32(29)), low & np.uint32(2**29 - 1)


def _rounds_up(rest: jax.Array, bits: int, kept: jax.Array) -> jax.Array:
    """Returns 1 if `rest`, of `bits` bits, rounds `kept` up: to nearest, ties to even."""
    half = np.uint32(2 ** (bits - 1))
    odd = (kept & np.uint32(1)) == 1
    return ((rest > half) | ((rest == half) & odd)).astype(jnp.uint32)
