"""The dynamic code is bitsandbytes's, number by number."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jmp_train.policies.quantizing import dynamic_code
from jmp_train.policies.quantizing.blocks import count_below, upper_ends

pytestmark = pytest.mark.quick


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
