"""What a report proposes was tried: one report mends all, says by how much, and claims what a run has shown."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from planting import harmful

import jmp_train as jt

pytestmark = pytest.mark.quick

F16, BF16 = jnp.float16, jnp.bfloat16
FULL = jnp.float32
RANDOM = np.random.default_rng(0)
X = jax.device_put(RANDOM.normal(size=(16, 8)).astype(np.float32))


def training(loss_fn: Any, params: Any, policy: str) -> tuple[jt.steps.TrainStep, jt.TrainState]:
    """Returns a train step with its first state."""
    optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.StaticLossScale(4.0))
    return jt.train_step(jt.stateless(loss_fn), optimizer, policy=policy), jt.TrainState.create(params, optimizer)


def by_rules(step: jt.steps.TrainStep, report: jt.tools.NumericsReport, dtype: Any) -> jt.steps.TrainStep:
    """Returns a step with a report's rules, as they are."""
    policy = jt.AutocastPolicy(FULL, FULL, FULL, autocast_dtype=dtype, rules=report.rules)
    return dataclasses.replace(step, policy=policy)


NEAR = X, X + RANDOM.normal(size=(16, 8), scale=0.1).astype(np.float32)


def distances_of(w: jax.Array, x: jax.Array) -> jax.Array:
    h = x * w
    distances = (h * h).sum(-1)[:, None] + (h * h).sum(-1)[None] - 2 * h @ h.T + 1  # two of them overflow
    return jnp.mean(jnp.log1p(distances.astype(jnp.float32)))


@pytest.mark.full
def test_the_rules_of_one_report_are_all_that_is_needed() -> None:
    step, state = training(distances_of, jnp.ones(8), "mixed_float16")
    report = jt.diagnose(step, state, 300 * X)
    (problem,) = harmful(report)
    assert (problem.kind, problem.code.partition("# ")[2]) == ("overflow", "two of them overflow")
    assert "dot_general" in problem.remedy.text  # which overflows once the other operation is float32
    assert "(before: not finite)" in problem.trial
    mended = by_rules(step, report, F16)
    assert not harmful(jt.diagnose(mended, state, 300 * X))
    np.testing.assert_allclose(mended(state, 300 * X)[1]["loss"], distances_of(jnp.ones(8), 300 * X), rtol=0.01)


def test_rules_that_do_not_mend_it_say_so() -> None:
    def half_inside(x: jax.Array) -> jax.Array:
        with_own_rules = jt.autocast(lambda x: jnp.sum(x @ x.T), F16)  # which rules from outside do not reach
        return with_own_rules(x) * x.sum()

    (problem,) = harmful(jt.diagnose(jt.autocast(half_inside, F16), 300 * X))
    assert problem.kind == "overflow"
    assert problem.trial.startswith("tried: these rules do not mend it, nor does anything else")


def test_an_error_that_no_rules_mend_is_a_problem_that_says_so() -> None:
    def near(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.sum(x * x, -1) + jnp.sum(y * y, -1) - 2 * jnp.einsum("ij,ij->i", x, y)  # cancels

    def alike(x: jax.Array, y: jax.Array) -> jax.Array:
        with_own_rules = jt.autocast(near, BF16)  # which rules from outside do not reach
        return jnp.exp(-8 * with_own_rules(x, y).astype(jnp.float32))

    (problem,) = harmful(jt.diagnose(jt.autocast(alike, BF16), *NEAR))
    assert (problem.kind, problem.code.partition("# ")[2]) == ("cancellation", "cancels")
    assert problem.trial.startswith("tried: these rules do not mend it, nor does anything else that was found")


MASK = np.tril(np.ones((4, 4), bool), -1) | np.diag([False, True, True, True])
FILLS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "full_like": lambda a: jnp.where(MASK, a, jnp.full_like(a, -1e9)),
    "full": lambda a: jnp.where(MASK, a, jnp.full(a.shape, -1e9, a.dtype)),
    "array": lambda a: jnp.where(MASK, a, jnp.array(-1e9, dtype=a.dtype)),
    "lax": lambda a: lax.select(MASK, a, lax.full_like(a, -1e9)),
    "constant": lambda a: jnp.where(MASK, a, np.full(a.shape, -1e9, a.dtype)),
}


@pytest.mark.quick_cases(1)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # which is the fault
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("full_like", "constant") else pytest.mark.full) for name in FILLS]
)
def test_a_fill_in_the_arrays_dtype_is_an_invalid_mask_and_no_fault_of_float32(name: str) -> None:
    def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
        masked = FILLS[name](x[:4, :4] @ w)
        return jnp.mean(jax.nn.softmax(masked, -1).astype(jnp.float32) ** 2)

    step, state = training(loss_fn, jnp.eye(4), "mixed_float16")
    report = jt.diagnose(step, state, X)
    (problem,) = harmful(report)
    assert (problem.kind, problem.code) == ("invalid mask", inspect.getsource(FILLS[name]).strip())
    assert (problem.remedy.value, problem.remedy.action) == (-65504, "mask")
    assert "jnp.finfo(x.dtype).min" in problem.remedy.text
    assert "in float32 too" not in str(report)


def test_float32_has_a_nan_too_only_where_a_run_in_float32_has_it() -> None:
    def negative(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sqrt(x * w - 9).astype(jnp.float32))

    def rounded(w: jax.Array, x: jax.Array) -> jax.Array:
        factor = 1.0004  # which is 1 in float16
        return jnp.sum(jnp.sqrt(w * factor + w * factor - 2 - 1e-4).astype(jnp.float32))

    step, state = training(negative, jnp.ones(8), "mixed_float16")
    (problem,) = harmful(jt.diagnose(step, state, X))
    assert problem.in_float32 == "too" and problem.said.endswith(", in float32 too")
    assert problem.remedy.action == "mathematics"
    step, state = training(rounded, jnp.ones(8), "mixed_float16")
    report = jt.diagnose(step, state, X)
    (problem,) = harmful(report)
    assert problem.in_float32 == "not" and problem.said.endswith(", and not where all of it is float32")
    assert not harmful(jt.diagnose(by_rules(step, report, F16), state, X))
