"""Rounding to half types and float8: bit for bit what float64 says, and right on average.

Draws are those of `jax.random`, bit for bit, whatever the key and the configuration.

Stochastic rounding has no bias: sums of a million roundings, in runs whose keys are independent.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pytrees import assert_bitwise_equal

from jmp_train.policies.quantizing import BLOCK_DTYPES, dequantize, dynamic_code, fold_in_each, quantize, round_to
from jmp_train.policies.quantizing.rounding import bits16, uniform

pytestmark = pytest.mark.quick

DTYPES = ["bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
SMALLEST = 2.0**-126  # below it, float32 itself is flushed to zero
rounded_to = jax.jit(round_to, static_argnums=1)


def magnitudes(dtype: str) -> np.ndarray:
    """Returns all finite numbers of a format that are not negative, ascending, in float64; their places are their bits.

    Of bfloat16 those below float32's normal numbers are zeros.
    """
    bits = np.arange(2 ** (8 * jnp.dtype(dtype).itemsize - 1), dtype=f"uint{8 * jnp.dtype(dtype).itemsize}")
    with np.errstate(invalid="ignore"):  # of signaling NaNs
        values = bits.view(jnp.dtype(dtype)).astype(np.float64)
    finite = values[np.isfinite(values)]
    return np.where(finite < SMALLEST, 0, finite)


def places_between(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the format's numbers, their midpoints and float32's next to both, with the place of the one below."""
    numbers = magnitudes(dtype)
    middles = ((numbers[:-1] + numbers[1:]) / 2).astype(np.float32)
    whole = numbers.astype(np.float32)
    around = [np.nextafter(x, np.float32(to)) for x in (middles, whole[1:]) for to in (0, np.inf)]
    x = np.concatenate([whole, middles, *around])
    x = x[(x == 0) | (x >= SMALLEST)]
    x = x[x <= numbers[-1]]
    return x, np.searchsorted(numbers, x.astype(np.float64), side="right") - 1


@pytest.mark.newest
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_nearest_is_float64s_at_every_number_and_midpoint(dtype: str) -> None:
    numbers = magnitudes(dtype)
    x, low = places_between(dtype)
    high = np.minimum(low + 1, len(numbers) - 1)
    below, above = x.astype(np.float64) - numbers[low], numbers[high] - x.astype(np.float64)
    wanted = np.where((above < below) | ((above == below) & (low % 2 == 1)), high, low)
    for sign in (1, -1):
        rounded = np.asarray(rounded_to(sign * x, dtype)).astype(np.float64)
        np.testing.assert_array_equal(rounded, sign * numbers[wanted])


@pytest.mark.newest
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
def test_stochastic_rounding_takes_a_neighbor_and_never_moves_what_the_format_has(dtype: str) -> None:
    numbers = magnitudes(dtype)
    x, low = places_between(dtype)
    for sign in (1, -1):
        rounded = np.asarray(rounded_to(sign * x, dtype, jax.random.key(3))).astype(np.float64)
        is_low, is_high = (np.abs(rounded) == numbers[np.minimum(place, len(numbers) - 1)] for place in (low, low + 1))
        assert (is_low | is_high).all()
        exact = numbers[low] == x
        np.testing.assert_array_equal(rounded[exact], sign * x[exact])
        assert 0.4 < is_low[~exact].mean() < 0.6 or dtype == "bfloat16"  # half are midpoints, the rest symmetric
        assert (np.sign(rounded) * sign >= 0).all()


@pytest.mark.newest
@pytest.mark.parametrize(
    "dtype", [pytest.param(dtype, marks=pytest.mark.full if "e5m2" in dtype else ()) for dtype in DTYPES]
)
def test_the_share_of_each_neighbor_is_the_distance_to_the_other(dtype: str) -> None:
    """At shares of 1/16 to 15/16, in a normal binade and among the subnormal numbers, within four deviations."""
    draws = 20_000
    numbers = magnitudes(dtype)
    one = int(np.searchsorted(numbers, 1.0))
    for place in (one,) if dtype == "bfloat16" else (one, 1):
        low, high = numbers[place], numbers[place + 1]
        shares = np.arange(1, 16) / 16
        x = np.tile(low + shares * (high - low), (draws, 1)).astype(np.float32)
        up = np.asarray(rounded_to(x, dtype, jax.random.key(5))).astype(np.float64) == high
        deviations = (up.mean(0) - shares) / np.sqrt(shares * (1 - shares) / draws)
        assert np.abs(deviations).max() < 4


@pytest.mark.newest
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("key", [None, 0])
def test_what_is_too_large_is_the_largest_and_nan_stays(dtype: str, key: int | None) -> None:
    largest = float(jnp.finfo(dtype).max)
    x = np.array([3.4e38, -3.4e38, np.inf, -np.inf, np.nan, -0.0], np.float32)
    rounded = np.asarray(rounded_to(x, dtype, None if key is None else jax.random.key(key))).astype(np.float32)
    inf = np.nan if dtype == "float8_e4m3fn" else np.inf
    np.testing.assert_array_equal(rounded, np.array([largest, -largest, inf, -inf, np.nan, -0.0], np.float32))
    assert np.signbit(rounded[-1])


KEYS = {
    "typed": lambda: jax.random.key(3),
    "uint32": lambda: jax.random.PRNGKey(3),
    "rbg": lambda: jax.random.key(3, impl="rbg"),
}


@pytest.mark.newest
@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("partitionable", [True, False])
def test_draws_are_those_of_jax(key: str, partitionable: bool) -> None:
    with jax.threefry_partitionable(partitionable):
        for shape in ((), (7,), (3, 5, 11)):
            mine, others = jax.jit(
                lambda key, shape=shape: (
                    (uniform(key, shape), bits16(key, shape)),
                    (jax.random.uniform(key, shape), jax.random.bits(key, shape, "uint16")),
                )
            )(KEYS[key]())
            assert_bitwise_equal(mine, others)


@pytest.mark.newest
@pytest.mark.parametrize("key", KEYS)
def test_keys_are_those_of_fold_in(key: str) -> None:
    numbers = [0, 5, 2**31, 2**32 - 1]
    keys = fold_in_each(KEYS[key](), numbers)
    for row, number in enumerate(numbers):
        assert_bitwise_equal(keys[row], jax.random.fold_in(KEYS[key](), np.uint32(number)))


@pytest.mark.newest
def test_a_program_of_draws_is_one_kernel_without_loops() -> None:
    program = jax.jit(lambda key: uniform(key, (64, 64))).lower(jax.random.key(0)).as_text()
    assert "while" not in program
    assert "while" in jax.jit(lambda key: jax.random.uniform(key, (64, 64))).lower(jax.random.key(0)).as_text()
    assert jnp.issubdtype(uniform(jax.random.key(0), (2,)).dtype, jnp.float32)


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


@pytest.mark.full
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
