"""Elements of a `while` loop under `vmap` that have stopped: not rounded on, not measured, not compared."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jmp_train as jt
from jmp_train.policies import MOSTLY_HALF, autocast
from jmp_train.policies.autocasting.emulating import emulated_autocast

pytestmark = pytest.mark.quick


def grown(limit: float, factor: float) -> Any:
    def fn(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda s: lax.while_loop(lambda c: c < limit, lambda c: c * factor, s))(x)

    return fn


def test_a_finite_step_has_no_overflow() -> None:
    x = (10 ** jnp.linspace(-5, 0.6, 16)).astype(jnp.float16)
    report = jt.diagnose(grown(3.0, 1.75), x)
    assert not report.problems
    (row,) = [row for row in report.rows if row.primitive == "mul"]
    assert row.largest < 3.0 * 1.75


def test_measures_count_the_elements_that_still_run() -> None:
    x = jnp.array([1.0, 40000.0], jnp.float16)  # infinite after 16 iterations, and after 1
    (row,) = [row for row in jt.diagnose(grown(60000.0, 2.0), x).rows if row.primitive == "mul"]
    assert row.runs == 16
    assert row.overflowed == pytest.approx(2 / 17)


def test_loops_within_count_those_that_run_in_both() -> None:
    def fn(x: jax.Array) -> jax.Array:
        def outer(s: jax.Array) -> jax.Array:
            return lax.while_loop(lambda c: c < 8.0, lambda c: lax.fori_loop(0, 2, lambda _, v: v * 2, c), s)

        return jax.vmap(outer)(x)

    x = jnp.array([1.0, 100.0, 4.0], jnp.float16)  # 2 iterations, none, 1
    (row,) = [row for row in jt.diagnose(fn, x).rows if row.primitive == "mul"]
    assert (row.runs, row.largest, row.smallest) == (4, 16.0, 2.0)


def test_a_shard_map_within_counts_the_elements_that_still_run() -> None:
    mesh = jax.make_mesh((2,), ("devices",), axis_types=(AxisType.Auto,))

    def doubled(x: jax.Array) -> jax.Array:
        return jax.shard_map(lambda x: x * 2, mesh=mesh, in_specs=P("devices"), out_specs=P("devices"))(x)

    def fn(x: jax.Array) -> jax.Array:
        return jax.vmap(lambda s: lax.while_loop(lambda c: c.sum() < 16.0, doubled, s))(x)

    x = jnp.array([[1.0, 2.0], [100.0, 200.0], [4.0, 2.0]], jnp.float16)  # 3 iterations, none, 2
    (row,) = [row for row in jt.diagnose(fn, x).rows if row.primitive == "mul"]
    assert (row.runs, row.largest, row.smallest) == (6, 16.0, 2.0)


def test_the_emulation_rounds_as_autocast_does() -> None:
    w = jnp.linspace(0.9, 1.1, 12).reshape(3, 4)

    def fn(w: jax.Array, x: jax.Array) -> jax.Array:
        def of_one(x: jax.Array) -> jax.Array:
            return lax.while_loop(lambda c: c.sum() < 50.0, lambda c: c + jnp.abs((c @ w) @ w.T), x)

        return jax.vmap(of_one)(x)

    x = jnp.array([[0.1, 0.2, 0.3], [1.0, 2.0, 3.0], [20.0, 20.0, 20.0]])
    expected = autocast(fn, rules=MOSTLY_HALF)(w, x)
    np.testing.assert_array_equal(emulated_autocast(fn, jnp.float16, lambda *_: True)(w, x), expected)
    assert np.abs(fn(w, x) - expected).max() > 1e-4


def test_parity_compares_what_the_loops_return() -> None:
    def log_probs(x: jax.Array) -> jax.Array:
        return jax.nn.log_softmax(grown(3.0, 1.75)(x).reshape(2, 8))

    report = jt.parity(log_probs, lambda x: log_probs(x * 1.0), 10 ** jnp.linspace(-2, 0.6, 16))
    assert report.operations is not None
    assert report.first_difference is None or report.first_difference.kind == "rounding"
