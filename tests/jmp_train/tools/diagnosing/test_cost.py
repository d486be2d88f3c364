"""A report compiles what is alike once, and a process keeps nothing of it."""

import gc
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_train as jt

pytestmark = pytest.mark.quick

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
