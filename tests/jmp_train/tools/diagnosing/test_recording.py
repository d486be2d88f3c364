"""Of a program that runs operation by operation, every result is kept.

Of long scans over large arrays a sample of iterations is measured, and none of their results is left out.

A report compiles what is alike once, and a process keeps nothing of it.
"""

import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.tools.diagnosing import Pair, record

pytestmark = pytest.mark.quick


def test_every_run_is_kept_with_its_shadow_and_what_it_reads() -> None:
    def kept(pair: Pair) -> tuple[float, float]:
        shadow = pair.actual if pair.shadow is None else pair.shadow
        return float(np.ravel(pair.actual)[0]), float(np.ravel(shadow)[0])

    def fn(x: jax.Array) -> jax.Array:
        return lax.scan(lambda carry, _: (carry * jnp.float16(1.1), None), x, length=3)[0] + jnp.float16(1)

    operations, (result,), (origins,) = record(jax.make_jaxpr(fn)(jnp.float16(1)), [jnp.float16(1)], kept)
    (times, plus) = (next(op for op in operations if op.equation.primitive.name == name) for name in ("mul", "add"))
    factor = float(np.float16(1.1))
    np.testing.assert_allclose([run[0][1] for run in times.kept], [factor, factor**2, factor**3], rtol=1e-6)
    actual = np.float16(1)
    for run in times.kept:
        actual = actual * np.float16(1.1)
        assert run[0][0] == actual
    numbers = {id(op): number for number, op in enumerate(operations)}
    assert numbers[id(times)] in times.reads  # of the iteration before
    assert numbers[id(times)] in plus.reads
    assert origins == {numbers[id(plus)]}
    assert float(result.shadow) == pytest.approx(factor**3 + 1, rel=1e-6)
    assert times.line.endswith(f":{fn.__code__.co_firstlineno + 1}")
    assert __file__ in times.line


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


X = jnp.linspace(0.5, 1, 4, dtype=jnp.float16)


def loops(x: jax.Array, count: int) -> jax.Array:
    """Runs scans that are alike, each traced anew."""
    for _ in range(count):
        x = lax.scan(lambda carry, _: (jnp.sin(carry) * jnp.float16(0.7), None), x, length=3)[0]
    return x


def programs_of(count: int, caplog: pytest.LogCaptureFixture) -> int:
    """Returns how many programs a report of some loops compiles."""
    caplog.clear()
    with jax.log_compiles():
        report = jt.diagnose(lambda x: loops(x, count), X)
    assert len(report.rows) == 2 * count
    return sum("Finished XLA compilation" in record.getMessage() for record in caplog.records)


def test_loops_that_are_alike_are_compiled_once(caplog: pytest.LogCaptureFixture) -> None:
    programs_of(1, caplog)  # and what is compiled once a process
    # The first loop reads numbers without a shadow, all others read some with one.
    two = programs_of(2, caplog)
    assert two > 0
    assert programs_of(4, caplog) == two


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_only_the_branch_that_is_taken_is_measured(taken: int) -> None:
    branches = [jnp.sin, lambda x: jnp.exp(jnp.exp(x)), lambda x: x * x]
    report = jt.diagnose(lambda i, x: lax.switch(i, branches, x), jnp.int32(taken), X)
    names = [row.primitive for row in report.rows]
    assert names == ["sin", "exp", "exp", "mul"]
    values = np.asarray(X, np.float64)
    largest = [np.sin(values).max(), np.exp(values).max(), np.exp(np.exp(values)).max(), (values**2).max()]
    measured = [(0, 1), (1, 3), (3, 4)][taken]
    for i, row in enumerate(report.rows):
        if measured[0] <= i < measured[1]:
            np.testing.assert_allclose(row.largest, largest[i], rtol=1e-3)
        else:
            assert row.infinite == row.nan == 0
            assert row.local_error == 0


@pytest.mark.full
def test_nothing_of_a_report_is_kept() -> None:
    def kept() -> tuple[int, int]:
        jt.diagnose(lambda x: loops(jnp.exp(x), 1).sum(), X)
        gc.collect()
        functions = [x for x in gc.get_objects() if isinstance(x, types.FunctionType)]
        ours = sum(x.__module__.startswith("jmp_train.tools.diagnosing") for x in functions if x.__module__)
        return ours, len(jax.devices()[0].client.live_executables())

    kept()
    assert kept() == kept()
