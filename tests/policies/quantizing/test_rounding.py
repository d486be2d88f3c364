"""Rounding to half types and float8: bit for bit what float64 says, and right on average."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.quantizing import round_to

pytestmark = [pytest.mark.quick, pytest.mark.newest]

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
