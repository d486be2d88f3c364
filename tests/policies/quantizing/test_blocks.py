"""Blocks of 8-bit codes: bit for bit what float64 says, right on average, and the same however they are sharded.

The dynamic code is bitsandbytes's, number by number.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from pytrees import assert_bitwise_equal

from jmp_train.policies.quantizing import BLOCK_DTYPES, BlockQuantized, dequantize, dynamic_code, quantize, requantize
from jmp_train.policies.quantizing.blocks import count_below, upper_ends

pytestmark = [pytest.mark.newest, pytest.mark.quick]


def numbers_of(dtype: str) -> np.ndarray:
    """Returns all numbers that a code has, ascending, in float64."""
    if dtype in ("int8", "uint8"):
        return dynamic_code(dtype == "int8").astype(np.float64)
    values = np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)).astype(np.float64)
    return np.unique(values[np.isfinite(values)])


def decoded(x: BlockQuantized) -> np.ndarray:
    return np.asarray(jax.jit(dequantize)(x)).astype(np.float64)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_every_number_and_midpoint_is_rounded_as_float64_says(dtype: str) -> None:
    """In one block whose scale is 1, so that codes are what they stand for."""
    numbers = numbers_of(dtype)
    middles = (numbers[:-1] + numbers[1:]) / 2
    close = middles.astype(np.float32)
    x = np.concatenate([numbers, close, *(np.nextafter(close, np.float32(to)) for to in (-np.inf, np.inf))])
    x = x.astype(np.float32)
    x = x[(x >= numbers[0]) & (np.abs(x) <= numbers[-1])]
    quantized = jax.jit(lambda x: quantize(x, dtype, block_size=x.size))(x)
    assert float(quantized.scales.max()) == 1
    low = np.searchsorted(numbers, x.astype(np.float64), side="right") - 1
    high = np.minimum(low + 1, len(numbers) - 1)
    below, above = x - numbers[low], numbers[high] - x
    if dtype.startswith("float8"):  # to the even one, whose bits, counted from zero, are even
        to_high = (above < below) | ((above == below) & ((low - len(numbers) // 2) % 2 == 1))
    else:
        to_high = above < below
    np.testing.assert_array_equal(decoded(quantized), numbers[np.where(to_high, high, low)])

    stochastic = decoded(jax.jit(lambda x: quantize(x, dtype, jax.random.key(0), block_size=x.size))(x))
    assert ((stochastic == numbers[low]) | (stochastic == numbers[high])).all()
    np.testing.assert_array_equal(stochastic[numbers[low] == x], x[numbers[low] == x])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_the_mean_of_many_is_the_number(dtype: str) -> None:
    """In blocks of one scale of 0.3; the bound is five deviations of a mean of two neighbors."""
    draws, numbers = 4000, numbers_of(dtype) / numbers_of(dtype)[-1] * 0.3
    signs = 1 if dtype == "uint8" else np.array([1, -1])
    row = np.append(signs * np.geomspace(1e-6, 0.29, 30).reshape(-1, 2), 0.3).astype(np.float32)
    x = jnp.asarray(np.tile(row, (draws, 1)))
    quantized = jax.jit(lambda x: quantize(x, dtype, jax.random.key(2), block_size=row.size))(x)
    mean = decoded(quantized).reshape(draws, -1).mean(0)
    place = np.clip(np.searchsorted(numbers, row), 1, len(numbers) - 1)
    steps = numbers[place] - numbers[place - 1]
    assert (np.abs(mean - row) <= 5 * steps / 2 / math.sqrt(draws) + 1e-7 * np.abs(row)).all()


@pytest.mark.full
def test_the_largest_magnitude_of_a_block_stays() -> None:
    x = np.random.default_rng(0).normal(size=(64, 512)).astype(np.float32)
    for dtype in BLOCK_DTYPES:
        y = np.abs(x) if dtype == "uint8" else x
        blocks = y.reshape(64, 8, 64)
        after = decoded(quantize(jnp.asarray(y), dtype)).reshape(blocks.shape)
        place = np.abs(blocks).argmax(-1, keepdims=True)
        largest = np.take_along_axis(blocks, place, -1)
        np.testing.assert_allclose(np.take_along_axis(after, place, -1), largest, rtol=2e-7)


@pytest.mark.full
@settings(max_examples=20, deadline=None)
@given(shape=st.lists(st.integers(1, 400), max_size=3).map(tuple), block_size=st.integers(1, 300))
def test_codes_have_the_arrays_shape_and_blocks_are_short_enough(shape: tuple[int, ...], block_size: int) -> None:
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    quantized = jax.eval_shape(lambda x: quantize(x, "int8", block_size=block_size), struct)
    assert quantized.codes.shape == shape
    *first, blocks = quantized.scales.shape
    assert tuple(first) == shape[: len(first)]
    length = math.prod(shape[len(first) :])
    assert math.ceil(length / blocks) <= block_size
    assert blocks < 4 * math.ceil(length / block_size) + 8
    assert jax.eval_shape(dequantize, quantized) == struct


@pytest.mark.parametrize(
    ("shape", "blocks"),
    [((768,), 8), ((50257, 768), 8), ((768, 3072), 16), ((768, 50257), 197), ((4096, 1), 16), ((3, 3, 64, 64), 16)],
)
def test_up_to_eight_devices_share_the_blocks_of_an_axis(shape: tuple[int, ...], blocks: int) -> None:
    struct = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert jax.eval_shape(lambda x: quantize(x, "int8"), struct).scales.shape[-1] == blocks


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("shape", [(), (5,), (3, 700), (2, 3, 5), (40, 1), (3, 3, 8, 40)])
def test_any_shape_comes_back(shape: tuple[int, ...]) -> None:
    x = np.random.default_rng(1).uniform(0.5, 1, shape).astype(np.float32)
    after = jax.jit(lambda x: dequantize(quantize(x, "int8", block_size=100)))(x)
    np.testing.assert_allclose(after, x, rtol=2**-6)


def test_what_is_not_finite_makes_its_block_nan_and_zeros_stay() -> None:
    x = np.ones((4, 512), np.float32)
    x[0, 0], x[1, 100], x[2, 511] = np.nan, np.inf, -1
    x[3] = 0
    extreme = np.array([[3.4e38, -3.4e38], [-3.4e38, 1.0]], np.float32)
    run = jax.jit(
        lambda x, y: [dequantize(quantize(x, "uint8")), dequantize(quantize(y, "int8")), quantize(y - y, "int8").codes]
    )
    after, finite, codes = map(np.asarray, run(x, extreme))
    lost = np.isnan(after).reshape(4, 8, 64)
    np.testing.assert_array_equal(np.argwhere(lost.any(-1)), [[0, 0], [1, 1], [2, 7]])
    assert lost.sum() == 3 * 64
    np.testing.assert_array_equal(after[3], 0)
    assert np.isfinite(finite).all()
    assert (codes == -1).all()  # index 127 of the code, stored less 128


LEAST, MOST = 1e-37, 3e38  # what float32 holds with room for an inverse
# Half of the widest relative step of a code from a tenth of its largest number on.
ERRORS = {
    "int8": 0.5 * 0.9 / 64 / 0.1,
    "uint8": 0.5 * 0.9 / 128 / 0.1,
    "float8_e4m3fn": 2.0**-4,
    "float8_e5m2": 2.0**-3,
}


@partial(jax.jit, static_argnums=(1, 2))
def there_and_back(x: jax.Array, dtype: str, stochastic: bool) -> jax.Array:
    """From zeros, as an optimizer's first step does."""
    old = quantize(jnp.zeros_like(x), dtype)
    return dequantize(requantize(x, old, jax.random.key(4) if stochastic else None))


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_numbers_stay_within_the_codes_error_and_nan_stays_nan(dtype: str, stochastic: bool) -> None:
    """At all magnitudes; of 4,096 numbers in one dimension, whose maximum XLA finds in parts and without NaN."""

    @settings(max_examples=15, deadline=None)
    @given(st.floats(math.log10(LEAST), math.log10(MOST)), st.integers(0, 2**32), st.integers(0, 4095), st.booleans())
    def check(exponent: float, seed: int, place: int, negative: bool) -> None:
        random = np.random.default_rng(seed)
        x = np.maximum(10.0**exponent * random.uniform(0.1, 1, 4096), LEAST)
        x *= 1 if dtype == "uint8" else random.choice([-1, 1], 4096)
        x = np.clip(x, -MOST, MOST).astype(np.float32)
        after = np.asarray(there_and_back(jnp.asarray(x), dtype, stochastic)).astype(np.float64)
        bound = ERRORS[dtype] * (2 if stochastic else 1)
        assert (np.abs(after / x.astype(np.float64) - 1) <= bound + 1e-6).all()
        x[place] = -np.nan if negative else np.nan
        lost = np.isnan(np.asarray(there_and_back(jnp.asarray(x), dtype, stochastic)))
        assert lost[place]
        assert lost.reshape(16, 256).all(-1).sum() == 1
        assert lost.sum() == 256

    check()


@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_constants_of_any_magnitude_stay(dtype: str) -> None:
    for constant in (LEAST, 1e-36, 1e-30, 1.0, 1e30, 1e38, MOST):
        after = np.asarray(there_and_back(jnp.full(4096, constant, jnp.float32), dtype, False)).astype(np.float64)
        np.testing.assert_allclose(after, constant, rtol=ERRORS[dtype])


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("dtype", BLOCK_DTYPES)
def test_blocks_that_have_not_changed_keep_their_bits(dtype: str) -> None:
    x = np.abs(np.random.default_rng(2).normal(size=(4, 512))).astype(np.float32)
    x = x if dtype == "uint8" else -x

    @jax.jit
    def run(x: jax.Array) -> list[BlockQuantized]:
        first = quantize(x, dtype, jax.random.key(7))
        changed = dequantize(first).at[1, 64:127].multiply(2)  # all of a block but one
        return [first, *(requantize(y, first, jax.random.key(8)) for y in (dequantize(first), changed))]

    first, again, changed = run(x)
    assert_bitwise_equal(again, first)
    same = np.asarray(changed.scales == first.scales)
    assert np.argwhere(~same).tolist() == [[1, 1]]


@pytest.mark.full
def test_eight_devices_make_the_bits_of_one() -> None:
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(16, 4096)).astype(np.float32))
    run: Any = jax.jit(lambda x, key: quantize(x, "int8", key))
    alone = run(x, jax.random.key(0))
    for spec in (P("data"), P(None, "data")):
        apart = run(jax.device_put(x, NamedSharding(mesh, spec)), jax.random.key(0))
        assert_bitwise_equal(apart, alone)
    program = run.lower(jax.device_put(x, NamedSharding(mesh, P(None, "data"))), jax.random.key(0)).compile()
    assert "all-gather" not in program.as_text()  # a device's part has whole blocks


def by_binary_digits(signed: bool) -> set[float]:
    """Returns the numbers from the paper's own description, from 7 or 8 digits.

    Zeros before the first one are the exponent: of n of them the number is 10**-n times a fraction, which the digits
    after that one count in equal parts of [0.1, 1], from the middle of the first.
    """
    width = 7 if signed else 8
    numbers = {0.0, 1.0}
    for bits in range(1, 2**width):
        digits = f"{bits:0{width}b}"
        zeros = digits.index("1")
        fraction = digits[zeros + 1 :]
        if zeros == width - 1 and not signed:
            continue  # of 8 digits the last exponent's one number is the zero's
        part = (int(fraction, 2) + 0.5 if fraction else 0.5) / 2 ** len(fraction)
        numbers.add((0.1 + 0.9 * part) * 10.0**-zeros)
    return numbers | {-x for x in numbers if x not in (0, 1)} if signed else numbers


@pytest.mark.parametrize("signed", [True, False])
def test_the_numbers_are_those_of_the_paper(signed: bool) -> None:
    code = dynamic_code(signed)
    assert (code.dtype, code.shape) == (np.float32, (256,))
    np.testing.assert_array_equal(code, np.sort(np.array(list(by_binary_digits(signed)))).astype(np.float32))


def test_numbers_that_bitsandbytes_prints() -> None:
    """Of its tables, for a few places."""
    signed, unsigned = dynamic_code(True), dynamic_code(False)
    np.testing.assert_allclose(
        signed[[0, 1, 126, 127, 128, 254]], [-0.9929687, -0.9789063, -5.5e-7, 0, 5.5e-7, 0.9929687], rtol=1e-6
    )
    np.testing.assert_allclose(unsigned[[1, 2, 3, 254]], [3.25e-7, 7.75e-7, 2.125e-6, 0.99648437], rtol=1e-6)


@pytest.mark.parametrize("signed", [True, False])
def test_a_code_ends_in_the_middle(signed: bool) -> None:
    code, ends = dynamic_code(signed).astype(np.float64), upper_ends(signed)
    middles = (code[:-1] + code[1:]) / 2
    assert (ends <= middles).all()
    assert (np.nextafter(ends, np.float32(np.inf)) > middles).all()


@pytest.mark.parametrize("middles", [True, False])
@pytest.mark.parametrize("signed", [True, False])
def test_a_count_is_that_of_a_search(signed: bool, middles: bool) -> None:
    """At all of the numbers and the float32 next to each, at starts of buckets, and at random."""
    numbers = upper_ends(signed) if middles else dynamic_code(signed)[1:]
    random = np.random.default_rng(0)
    starts = (np.arange(100 << 7, (127 << 7) + 1, dtype=np.int32) << 16).view(np.float32)
    spread = 10 ** random.uniform(-9, 0, 20_000)
    x = np.concatenate([numbers, starts, spread.astype(np.float32), np.zeros(1, np.float32)])
    x = np.concatenate([x, *(np.nextafter(x, np.float32(to)) for to in (-2, 2))])
    x = np.concatenate([x, -x])
    x = x[(np.abs(x) >= np.finfo(np.float32).tiny) | (x == 0)]
    count = jax.jit(lambda x, signed: count_below(x, signed, middles=middles))
    np.testing.assert_array_equal(count(jnp.asarray(x), signed), np.searchsorted(numbers, x, side="left"))
    lost = np.asarray(count(jnp.asarray([np.nan, -np.nan, np.inf, -np.inf], jnp.float32), signed))
    assert ((lost >= 0) & (lost <= 255)).all()
