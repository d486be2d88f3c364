"""A diagnosis for a device rounds products of float32 operands as the device does, also in what it tries."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jmp_train as jt
from jmp_train.tools.aot import GPUS, TPUS

pytestmark = pytest.mark.quick

DRAWS = np.random.default_rng(0)
CENTER = 10 * DRAWS.normal(size=(1, 16))
X, Y = (jnp.asarray(CENTER + 0.3 * DRAWS.normal(size=(32, 16)), jnp.float32) for _ in range(2))
NUMBERS = ("NHWC", "HWIO", "NHWC")


def distances(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.sum(x * x, 1)[:, None] + jnp.sum(y * y, 1)[None] - 2 * (x @ y.T)


def affinity(word: Any) -> Callable[..., Any]:
    def fn(x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.exp(-jt.autocast_as(word)(distances)(x, y)).mean(), jnp.tanh(y @ y.T).mean()

    return jt.autocast(fn)


def rounded(x: jax.Array, bits: int) -> np.ndarray:
    """Returns numbers rounded to some bits of mantissa, in float64."""
    mantissa, exponent = np.frexp(np.asarray(x, np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, bits + 1)), exponent - bits - 1)


@pytest.mark.parametrize(("words", "device"), [("tf32", None), ("tf32", GPUS["V100-16GB"]), ("float32", "tpu")])
@pytest.mark.quick_cases(1)
def test_a_device_that_does_not_round_products_has_no_problem(words: Any, device: Any) -> None:
    assert jt.diagnose(affinity(words), X, Y, device=device).problems == ()


@pytest.mark.parametrize(
    ("device", "name"), [(GPUS["A100-40GB"], "TF32"), pytest.param("tpu", "bfloat16", marks=pytest.mark.full)]
)
def test_what_a_gpu_or_a_tpu_cannot_bear_is_found_and_float32_by_a_rule_mends_it_there(device: Any, name: str) -> None:
    report = jt.diagnose(affinity("tf32"), X, Y, device=device)
    (problem,) = report.problems
    assert (problem.kind, problem.line) == ("cancellation", distances.__code__.co_firstlineno + 1)
    assert problem.trial.startswith("tried: these rules mend it; ")
    assert f"round them to {name}, as the device does" in str(report)
    by_rules = jt.autocast(affinity("tf32").__wrapped__, rules=report.rules)  # pyright: ignore[reportFunctionMemberAccess]
    assert jt.diagnose(by_rules, X, Y, device=device).problems == ()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(("device", "bits"), [("cuda", 10), (TPUS["v5e"], 7), (SimpleNamespace(platform="gpu"), 10)])
def test_the_error_is_that_of_rounded_operands(device: Any, bits: int) -> None:
    exact, ours = (np.asarray(x, np.float64) @ np.asarray(Y, np.float64).T for x in (X, X))
    ours = rounded(X, bits) @ rounded(Y, bits).T
    error = np.abs(ours - exact).sum() / np.abs(exact).sum()
    (row,) = jt.diagnose(lambda x, y: x @ y.T, X, Y, device=device).rows
    assert row.inherited_error == row.local_error == pytest.approx(error, rel=1e-2)


@pytest.mark.full
def test_in_loops_branches_convolutions_and_both_passes() -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        x = lax.scan(lambda c, _: (jax.checkpoint(lambda c: jnp.sin(c @ w))(c), None), x, None, 3)[0]
        x = lax.cond(x[0, 0] > -9, lambda x: x @ w, lambda x: w @ x, x)
        return lax.conv_general_dilated(x[None, None], w[None, None], (1, 1), "SAME", dimension_numbers=NUMBERS).sum()

    w = jnp.asarray(DRAWS.normal(size=(16, 16)), jnp.float32)
    grad = jax.jit(jax.value_and_grad(fn, (0, 1)))

    def products(device: Any, fn: Any = grad) -> list[Any]:
        rows = jt.diagnose(fn, w, w, device=device).rows
        return [row for row in rows if row.primitive in ("dot_general", "conv_general_dilated") and row.runs]

    there, here = products("cuda"), products(None)
    assert len(there) == len(here) >= 7
    assert all(1e-5 < row.local_error < 1e-2 for row in there)
    assert {row.local_error for row in here} == {0.0}
    with jax.default_matmul_precision("highest"):
        jax.clear_caches()
        assert {row.local_error for row in products("tpu")} == {0.0}
    assert {r.local_error for r in products("cuda", lambda x, w: jnp.matmul(x, w, precision="high"))} != {0.0}
    assert {r.local_error for r in products("tpu", lambda x, w: jnp.matmul(x, w, precision="high"))} == {0.0}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("word", ["tf32_x3", "bf16_x3"])
def test_words_that_cpus_lack_are_diagnosed_on_them(word: Any) -> None:
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.scan(lambda c, _: (jt.autocast_as(word)(jnp.matmul)(c, w), None), x @ w, None, 2)[0].sum()

    w = jnp.asarray(0.1 * DRAWS.normal(size=(16, 16)), jnp.float32)
    grad = jax.value_and_grad(jt.autocast(fn), (0, 1))
    assert jt.diagnose(grad, w, w, device="cuda").problems == ()


def test_a_wrong_device_is_named() -> None:
    with pytest.raises(ValueError, match=r"device='H100' must be .*jt\.aot\.GPUS"):
        jt.diagnose(jnp.sum, X, device="H100")
