"""Stochastic rounding has no bias: sums of a million roundings, in runs whose keys are independent."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.quantizing import BLOCK_DTYPES, dequantize, dynamic_code, quantize, round_to

pytestmark = pytest.mark.full

RUNS, SIDE, BLOCK = 32, 1000, 125  # blocks of 125, because 8 of them divide an axis of 1,000
CODES = [(dtype, False) for dtype in ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")]
CODES += [(dtype, True) for dtype in BLOCK_DTYPES]


@partial(jax.jit, static_argnums=(1, 2))
def rounded(x: jax.Array, dtype: str, in_blocks: bool, key: jax.Array) -> jax.Array:
    if in_blocks:
        return dequantize(quantize(x, dtype, key, block_size=BLOCK))
    return round_to(x, dtype, key).astype(jnp.float32)


def numbers_of(dtype: str) -> np.ndarray:
    """Returns the finite numbers of a code, ascending, in float64."""
    if dtype in ("int8", "uint8"):
        return dynamic_code(dtype == "int8").astype(np.float64)
    bits = 8 * jnp.dtype(dtype).itemsize
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        values = np.arange(2**bits, dtype=f"uint{bits}").view(jnp.dtype(dtype)).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def deviation(x: np.ndarray, dtype: str, in_blocks: bool) -> float:
    """Returns the standard deviation of the sum of all roundings, by each number's neighbors in float64."""
    scales = np.ones((SIDE, SIDE))
    if in_blocks:
        scales = np.repeat(np.asarray(quantize(jnp.asarray(x), dtype, block_size=BLOCK).scales, np.float64), BLOCK, 1)
    numbers, scaled = numbers_of(dtype), x / scales
    above = np.clip(np.searchsorted(numbers, scaled), 1, len(numbers) - 1)
    variance = (scaled - numbers[above - 1]) * (numbers[above] - scaled)
    return float(np.sqrt((np.maximum(variance, 0) * scales**2).sum()))


@pytest.mark.parametrize(("dtype", "in_blocks"), CODES)
def test_the_mean_of_32_runs_is_within_three_standard_errors(dtype: str, in_blocks: bool) -> None:
    """The z of a run is the sum of its 1,000,000 errors in standard deviations; all runs round the same numbers."""
    x = np.random.default_rng(0).normal(size=(SIDE, SIDE)).astype(np.float32)
    x = np.abs(x) if dtype == "uint8" else x
    exact, unit = x.astype(np.float64), deviation(x.astype(np.float64), dtype, in_blocks)
    z = [
        (np.asarray(rounded(jnp.asarray(x), dtype, in_blocks, key), np.float64) - exact).sum() / unit
        for key in jax.random.split(jax.random.key(44), RUNS)
    ]
    assert abs(np.mean(z)) < 3 / np.sqrt(RUNS), z
    assert 0.6 < np.std(z, ddof=1) < 1.5, z  # 1, within four standard errors of a deviation of 32: z is what it says
