"""Of long scans over large arrays a sample of iterations is measured, and none of their results is left out."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_train as jt

pytestmark = pytest.mark.quick

LENGTH, SIZE = 64, 2**20
START = jnp.float16(np.linspace(0.5, 1, SIZE))


def scanned(carry: jax.Array, factors: jax.Array, *, reverse: bool = False) -> tuple[jax.Array, jax.Array]:
    """Multiplies large arrays by one number in each iteration, and returns each sum of some of them."""

    def body(carry: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
        carry = carry * factor
        return carry, carry[0] + carry[1]

    return lax.scan(body, carry, factors, reverse=reverse)


@pytest.mark.full
@pytest.mark.parametrize("reverse", [False, True])
def test_a_sample_is_measured_of_results_that_are_those_of_all_iterations(reverse: bool) -> None:
    factors = jnp.float16(1 + 0.02 * np.cos(np.arange(LENGTH) ** 2))
    carry, sums = scanned(START, factors, reverse=reverse)

    def compared(carry: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        found, found_sums = scanned(carry, factors, reverse=reverse)
        return jnp.abs(found - carry_of_all).max(), jnp.abs(found_sums - sums).max()

    carry_of_all = carry
    report = jt.diagnose(compared, START, factors)
    product = next(row for row in report.rows if row.primitive == "mul")
    # Both differences are 0 in the function as it is, and the shadow's are roundings.
    differences = [row for row in report.rows if row.primitive == "sub"]
    assert [row.runs for row in differences] == [1, 1]
    assert all(0 < row.largest < 0.05 for row in differences)
    assert all(row.inherited_error == 1 for row in differences)
    assert 8 <= product.runs <= 64 // 4
    exact = np.cumprod(np.asarray(factors, np.float64)[:: -1 if reverse else 1])
    assert 0.98 * exact.max() < product.largest < 1.001 * exact.max()
    assert 1e-4 < product.local_error < 3e-4


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("lost", [0, 1, 13, LENGTH - 1])
def test_the_iteration_that_overflows_is_measured_wherever_it_is(lost: int) -> None:
    factors = jnp.ones(LENGTH, jnp.float16).at[lost].set(40000.0)
    report = jt.diagnose(lambda carry, factors: scanned(carry + carry, factors)[0].sum(), START, factors)
    problem = report.problems[0]
    assert (problem.kind, problem.primitive) == ("overflow", "mul")
    (product,) = (row for row in report.rows if row.primitive == "mul" and row.overflowed)
    assert product.line == problem.line
    assert product.largest == 80000
