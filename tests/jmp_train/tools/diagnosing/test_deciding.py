"""Whole numbers that half precision decides: how many are others than in float32, and whether that changes results."""

import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from planting import harmful

import jmp_train as jt
from jmp_train.tools.diagnosing import examining

pytestmark = pytest.mark.quick

F32, BF16 = jnp.float32, jnp.bfloat16
POSITIONS = jnp.arange(257, dtype=jnp.float32)  # which bfloat16 holds


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


def test_whole_numbers_that_change_nothing_are_no_problem() -> None:
    table = jnp.ones(200)
    fn = jt.apply_policy(looked_up, "params=float32,compute=bfloat16,output=float32")
    report = jt.diagnose(fn, table, POSITIONS)
    assert any(row.decided for row in report.rows)
    assert not harmful(report)


BF16_PARTS = "params=float32,compute=bfloat16,output=float32"
TABLE = jax.random.normal(jax.random.key(0), (64,))
UNIFORM = jax.random.uniform(jax.random.key(2), (256,))


def cast(table: jax.Array, x: jax.Array) -> jax.Array:
    return table[jnp.floor(x * 500).astype(jnp.int32) % 64]  # decides


def of_floors(table: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.where(jnp.floor(x * 500) % 2 == 0, table[0], table[1])  # decides


def argmax(table: jax.Array, x: jax.Array) -> jax.Array:
    scores = jnp.sin(500 * x[:, None] + jnp.arange(64, dtype=x.dtype))  # decides
    return table[jnp.argmax(scores, -1)]


def order(table: jax.Array, x: jax.Array) -> jax.Array:
    return table[jnp.argsort(x[:64] + 100)] * jnp.arange(64, dtype=x.dtype)  # decides


def top(table: jax.Array, x: jax.Array) -> jax.Array:
    return table * lax.top_k(x * 3, 64)[1].astype(x.dtype)  # decides


def digitized(table: jax.Array, x: jax.Array) -> jax.Array:
    edges = jnp.linspace(0, 6.5, 63).astype(x.dtype)
    return table[jnp.digitize(jnp.sqrt(x * 40), edges)]  # decides


def searched(table: jax.Array, x: jax.Array) -> jax.Array:
    edges = jnp.linspace(0, 1, 63).astype(x.dtype)
    return table[jnp.searchsorted(edges, x * x)]  # decides


def bucketed(table: jax.Array, x: jax.Array) -> jax.Array:
    far = 16 + jnp.log(x * 2000 / 16) / jnp.log(2000 / 16) * 47  # decides
    return table[jnp.clip(far.astype(jnp.int32), 0, 63)]


def looped(table: jax.Array, x: jax.Array) -> jax.Array:
    def body(place: jax.Array, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        place = (place + (number * 500).astype(jnp.int32)) % 64  # decides
        return place, table[place]

    return lax.scan(body, jnp.int32(0), x)[1]


def binned(table: jax.Array, x: jax.Array) -> jax.Array:
    bins = (x * 500).astype(jnp.int32) % 64  # decides
    return jax.ops.segment_sum(jnp.sin(x * 7), bins, 64) * table


def nearest(table: jax.Array, x: jax.Array) -> jax.Array:
    whole = jnp.round(60 * x)  # decides
    return table[whole.astype(jnp.int32)] * (1 + whole)


WAYS = (
    *(cast, argmax, looped, of_floors, order, top, digitized, searched, bucketed, jax.checkpoint(cast), binned),
    nearest,
)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(
    "fn",
    [pytest.param(fn, marks=[] if number < 2 else pytest.mark.full) for number, fn in enumerate(WAYS)],
    ids=[f"{number}-{fn.__name__}" for number, fn in enumerate(WAYS)],
)
def test_each_way_to_decide_is_named_with_its_line_and_the_error_that_it_makes(fn: Callable[..., jax.Array]) -> None:
    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(fn(table, x).astype(jnp.float32) ** 2)

    half = jt.apply_policy(loss, BF16_PARTS)
    report = jt.diagnose(jax.value_and_grad(half), TABLE, UNIFORM)
    (problem,) = harmful(report)
    assert problem.kind in ("integer precision lost", "decided differently")
    assert problem.code.endswith("# decides")
    assert problem.trial.startswith("tried: these rules mend it; the loss is off by 0%")
    assert "; in half precision: 0.0% of the flops (before: " in problem.trial
    exact = float(loss(TABLE, UNIFORM))
    off = abs(float(half(TABLE, UNIFORM)) / exact - 1)
    (said,) = re.findall(r"the loss is off by ([\d.]+)%, gradients off by", problem.evidence)
    assert float(said) / 100 == pytest.approx(off, rel=0.1, abs=5e-3)
    mended = jt.autocast(loss, BF16, rules=report.rules)
    assert float(mended(TABLE, UNIFORM)) == pytest.approx(exact, rel=1e-3)


def by_floor(table: jax.Array, place: jax.Array) -> jax.Array:
    low = jnp.floor(place)
    index = low.astype(jnp.int32)
    return table[index] * (1 - (place - low)) + table[index + 1] * (place - low)


def by_ceil(table: jax.Array, place: jax.Array) -> jax.Array:
    low, high = jnp.floor(place), jnp.ceil(place)
    index = low.astype(jnp.int32), high.astype(jnp.int32)
    return table[index[0]] * (high - place + (low == high).astype(place.dtype)) + table[index[1]] * (place - low)


def scattered(table: jax.Array, place: jax.Array) -> jax.Array:
    low, high = jnp.floor(place), jnp.ceil(place)
    sums = jnp.zeros_like(table).at[low.astype(jnp.int32)].add(high - place + (low == high).astype(place.dtype))
    return table * sums.at[high.astype(jnp.int32)].add(place - low)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("fn", [by_floor, by_ceil, scattered])
def test_interpolation_is_the_same_on_either_side_of_a_whole_number(fn: Callable[..., jax.Array]) -> None:
    """If the shadow had the index of half precision with a rest of its own, both would be wrong."""

    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(fn(table, x * 60).astype(jnp.float32) ** 2)

    report = jt.diagnose(jax.value_and_grad(jt.apply_policy(loss, BF16_PARTS)), jnp.sin(jnp.arange(64) / 6), UNIFORM)
    assert any(row.decided for row in report.rows if row.primitive == "floor")
    assert not harmful(report), report


def test_the_same_decisions_are_examined_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[tuple[Any, frozenset[int]]] = []
    run = examining.run_beside_shadow

    def noted(fn: Any, args: Any, steps: int, rounding: Any = None, own: Collection[int] = ()) -> Any:
        runs.append((fn, frozenset(own)))
        return run(fn, args, steps, rounding, own)

    monkeypatch.setattr(examining, "run_beside_shadow", noted)
    assert harmful(jt.diagnose(jt.apply_policy(cast, BF16_PARTS), TABLE, UNIFORM))
    with_own = [(fn, own) for fn, own in runs if own]
    assert len(set(with_own)) == len(with_own) > 0


def test_a_step_that_casts_for_itself_is_told_too() -> None:
    def step(table: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        loss, grads = jax.value_and_grad(lambda t: jnp.mean(cast(t.astype(BF16), x.astype(BF16)).astype(F32) ** 2))(
            table
        )
        return table - 0.01 * grads, loss

    (problem,) = harmful(jt.diagnose(step, TABLE, UNIFORM))
    assert (problem.kind, problem.trial) == ("integer precision lost", "")
    assert problem.code.endswith("# decides")


@pytest.mark.full
def test_comparisons_and_metrics_that_do_no_harm_are_no_problem() -> None:
    """A rectifier selects one of two equal numbers, and no gradient depends on an accuracy."""

    def loss(params: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = jax.nn.relu(x @ params)
        logits = jax.nn.relu(hidden @ params.T) / 256 + 4  # nearly the same
        labels = jnp.arange(8) % 4
        accuracy = jnp.mean(jnp.argmax(logits, -1) == labels)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), labels)), accuracy

    params, x = jax.random.normal(jax.random.key(0), (16, 32)) / 4, jax.random.normal(jax.random.key(1), (8, 16))
    step = jax.value_and_grad(jt.apply_policy(loss, BF16_PARTS), has_aux=True)
    report = jt.diagnose(step, params, x)
    assert any(row.decided for row in report.rows if row.primitive == "argmax")
    assert not harmful(report), report


def test_a_result_of_whole_numbers_counts() -> None:
    fn = jt.apply_policy(lambda x: jnp.argsort(x + 100), BF16_PARTS)
    (problem,) = harmful(jt.diagnose(fn, UNIFORM))
    exact, half = np.argsort(np.asarray(UNIFORM) + 100), np.asarray(fn(UNIFORM))
    assert f"results are off by {np.mean(exact != half):.0%}" in problem.evidence


@pytest.mark.full
def test_an_index_that_is_out_of_range_in_half_precision_is_named_and_not_its_nan() -> None:
    def loss(table: jax.Array, x: jax.Array) -> jax.Array:
        place = x - 0.4  # 254.6 at the end
        return jnp.mean(jnp.take(table, place.astype(jnp.int32)).astype(jnp.float32) ** 2)

    step = jax.value_and_grad(jt.apply_policy(loss, BF16_PARTS))
    first, *_ = harmful(jt.diagnose(step, jnp.sin(jnp.arange(255.0)), POSITIONS[:256]))
    assert (first.kind, first.code) == ("integer precision lost", "place = x - 0.4  # 254.6 at the end")
    assert "with which the loss is not finite, gradients off by" in first.evidence


@pytest.mark.parametrize("of", [jnp.mean, pytest.param(lambda x: x, marks=pytest.mark.full)])
def test_results_that_are_not_finite_are_not_off_by_nothing(of: Any) -> None:
    def at(table: jax.Array, x: jax.Array) -> jax.Array:
        place = x - 0.4  # decides
        return of(jnp.take(table, place.astype(jnp.int32)).astype(F32))  # NaN at the end

    first, *_ = harmful(jt.diagnose(jt.apply_policy(at, BF16_PARTS), jnp.sin(jnp.arange(255.0)), POSITIONS[:256]))
    assert first.code.endswith("# decides")
    assert first.evidence.endswith("with which results are not finite")
    assert "results are off by 0% (before: not finite)" in first.trial


def test_a_decision_that_inherits_an_earlier_error_is_not_named_again() -> None:
    def loss(w: jax.Array, x: jax.Array, target: jax.Array) -> jax.Array:
        apart = 224 * jnp.tanh(x @ w) - target  # wrong
        return optax.huber_loss(apart.astype(F32)).mean()

    x, w = (jax.random.normal(jax.random.key(seed), shape) for seed, shape in ((3, (64, 16)), (4, (16, 8))))
    target = 224 * jnp.tanh(x @ w / 8) + 0.3 * jax.random.normal(jax.random.key(5), (64, 8))
    step = jax.value_and_grad(jt.apply_policy(loss, BF16_PARTS))
    report = jt.diagnose(step, w / 8, x, target)
    assert any(row.decided > 0.1 for row in report.rows if row.primitive in ("eq", "ge"))
    assert [(problem.kind, problem.code.partition("# ")[2]) for problem in harmful(report)] == [
        ("cancellation", "wrong")
    ], report
