"""Whole numbers that half precision decides: how many are others than in float32, and whether that changes results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

BF16 = jnp.bfloat16
POSITIONS = jnp.arange(257, dtype=jnp.float32)  # which bfloat16 holds


def problems(report: jt.policies.NumericsReport) -> list[jt.policies.Problem]:
    return [problem for problem in report.problems if problem.severity == "problem"]


def looked_up(table: jax.Array, x: jax.Array) -> jax.Array:
    """Looks a table up at 0.75 of each number."""
    place = x * 0.75  # decides
    return table[place.astype(jnp.int32)]


def test_the_share_of_other_whole_numbers_is_that_of_numpy() -> None:
    table, x = jnp.arange(200, dtype=jnp.float32), POSITIONS.astype(BF16)
    report = jt.diagnose(looked_up, table, x)
    (row,) = (row for row in report.rows if row.dtype == "int32")
    exact = np.arange(257) * 0.75
    half = np.asarray(jnp.asarray(exact, BF16), np.float64)
    assert row.decided == pytest.approx(np.mean(np.trunc(exact) != np.trunc(half)))
    assert row.decided > 0


def test_whole_numbers_that_change_the_result_are_a_problem_where_they_are_computed() -> None:
    table = jax.random.normal(jax.random.key(0), (200,))
    fn = jt.apply_policy(looked_up, "params=float32,compute=bfloat16,output=float32")
    (problem,) = problems(jt.diagnose(fn, table, POSITIONS))
    assert (problem.kind, problem.code) == ("integer precision lost", "place = x * 0.75  # decides")
    assert "are other whole numbers than those of float32" in problem.evidence
    assert problem.trial.startswith("tried: these rules mend it")


def test_whole_numbers_that_change_nothing_are_no_problem() -> None:
    table = jnp.ones(200)
    fn = jt.apply_policy(looked_up, "params=float32,compute=bfloat16,output=float32")
    report = jt.diagnose(fn, table, POSITIONS)
    assert any(row.decided for row in report.rows)
    assert not problems(report)
