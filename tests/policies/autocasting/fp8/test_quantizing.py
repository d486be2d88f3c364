"""Quantizers beside float64 references: every value of the formats, the midpoints and what is next to them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.autocasting.fp8.casting import dequantized, quantize, quantized, scale_of
from jmp_train.policies.autocasting.fp8.recipes import E8M0, WHOLE, Scaling

pytestmark = pytest.mark.quick

FORMATS = [jnp.float8_e4m3fn, jnp.float8_e5m2]
MX = Scaling(32, dtype=E8M0)
jitted = jax.jit(quantized, static_argnums=(1, 2, 3))


def values_of(dtype: Any) -> Any:
    """Returns the finite values of a format in order, in float64."""
    values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def nearest(x: Any, dtype: Any) -> Any:
    """Returns the nearest values of a format, of two the one with an even last bit; the largest for what is beyond."""
    values = values_of(dtype)
    x = np.asarray(x, np.float64)
    above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
    low, high = values[above - 1], values[above]
    low_is_even = low.astype(jnp.dtype(dtype)).view(np.uint8) % 2 == 0
    to_low = (x - low < high - x) | ((x - low == high - x) & low_is_even)
    return np.where(to_low, low, high)


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_value_and_midpoint_and_what_is_next_to_them(dtype: Any) -> None:
    values = values_of(dtype)
    middles = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    ends = np.array([*[448, 464, 465, 57344, 61440, 65536, 1e30, 3e38], 2.0**-24], np.float32)
    exact = [values.astype(np.float32), middles, ends, -ends]
    beside = [np.nextafter(x, np.float32(end)) for x in exact for end in (-np.inf, np.inf)]
    x = np.concatenate([*exact, *beside])
    got = jax.jit(quantize, static_argnums=1)(x, dtype)
    np.testing.assert_array_equal(np.asarray(got).astype(np.float64), nearest(x, dtype))
    for half in (jnp.float16, jnp.bfloat16):
        all_halves = np.arange(2**16, dtype=np.uint16).view(jnp.dtype(half))
        finite = all_halves[np.isfinite(all_halves.astype(np.float32))]
        got = np.asarray(quantize(jnp.asarray(finite), dtype)).astype(np.float64)
        np.testing.assert_array_equal(got, nearest(finite.astype(np.float64), dtype))


@pytest.mark.parametrize("dtype", FORMATS)
def test_what_has_overflowed_does_not_look_like_a_number(dtype: Any) -> None:
    x = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1e38])
    got = quantize(x, dtype, 1e30)
    np.testing.assert_array_equal(np.isfinite(np.asarray(got, np.float32)), [False, False, False, True])
    assert float(got[3]) == float(jnp.finfo(dtype).max)  # the scale is what overflowed there


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("margin", [0, 3])
def test_scales_are_those_of_transformer_engine(dtype: Any, margin: int) -> None:
    amax = np.array([1.0, 3.3, 448.0, 1e-30, 1e30, 0.0, np.inf, np.nan, 1e-37], np.float32)
    most = float(jnp.finfo(dtype).max)
    wanted = (np.float32(most) / amax[:5]) / np.float32(2.0**margin)
    got = jax.jit(scale_of, static_argnums=(1, 2))(amax, dtype, margin, 5.0)
    np.testing.assert_allclose(got[:5], wanted, rtol=2e-7)
    np.testing.assert_array_equal(got[5:8], [5, 5, 5])
    assert np.isfinite(got[8])
    assert got.dtype == jnp.float32


def test_amax_sees_what_is_not_finite() -> None:
    for scaling in (WHOLE, MX):

        def amax_of(x: Any, scaling: Scaling = scaling) -> Any:
            return jitted(x, 1, scaling, jnp.dtype(jnp.float8_e4m3fn)).amax

        assert float(amax_of(jnp.array([1.0, -3.0], jnp.bfloat16))) == 3
        assert np.isnan(amax_of(jnp.array([1.0, jnp.nan])))
        assert np.isinf(amax_of(jnp.array([1.0, -jnp.inf])))
        assert float(amax_of(jnp.zeros((0, 3)))) == 0


@pytest.mark.parametrize("dtype", FORMATS)
def test_blocks_have_the_smallest_scales_that_clip_nothing(dtype: Any) -> None:
    random = np.random.default_rng(0)
    x = (random.normal(size=(40, 70)) * 2.0 ** random.integers(-20, 20, (40, 70))).astype(np.float32)
    x[3], x[2] = 0, 448 * 2.0**7  # an amax that needs no rounding up
    x[4] = 1.5 * float(jnp.finfo(dtype).max) * 2.0**-127  # over which the type's largest number is subnormal
    operand = jitted(x, 1, MX, jnp.dtype(dtype))
    assert operand.array.shape == (40, 96)
    assert operand.blocks.dtype == jnp.float8_e8m0fnu
    whole = x.astype(np.float64).T
    got = np.asarray(operand.array).astype(np.float64).T[:70]
    found = np.asarray(operand.blocks).astype(np.float64).T
    for start in range(0, len(whole), 32):
        block, scale = whole[start : start + 32], found[start // 32]
        amax = np.abs(block).max(0)
        with np.errstate(divide="ignore"):
            exponent = np.maximum(np.ceil(np.log2(amax / float(jnp.finfo(dtype).max))), -126)
        np.testing.assert_array_equal(scale, 2.0**exponent)
        np.testing.assert_array_equal(got[start : start + 32], nearest(block / scale, dtype))
    back = np.asarray(dequantized(operand)).astype(np.float64).T[:70]
    np.testing.assert_array_equal(back, got * np.repeat(found, 32, 0)[: len(got)])


def test_a_block_with_an_infinity_spoils_no_other() -> None:
    x = jnp.ones(64).at[5].set(jnp.inf)
    operand = jitted(x, 1, MX, jnp.dtype(jnp.float8_e4m3fn))
    np.testing.assert_array_equal(np.isfinite(np.asarray(operand.array, np.float32)), np.arange(64) != 5)
    np.testing.assert_array_equal(np.asarray(dequantized(operand), np.float32)[32:], 1)
