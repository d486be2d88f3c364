"""Entries of rules that match nothing are named when autocast first traces, and in its report."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jmp_train as jt

pytestmark = pytest.mark.quick

X = jnp.ones((4, 4))


@jax.jit
def attend(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x)


def loss_fn(w: jax.Array, x: jax.Array) -> jax.Array:
    with jax.named_scope("decoder/attention"):
        return (jax.lax.scan(lambda c, _: (attend(c @ w), None), x, None, 2)[0] - 1).sum()


MET: dict[str, Any] = {
    "paths": {"decoder/att": "float32"},
    "functions": {"attend": "float32", "logsumexp": "float32"},
    "operations": {r":exp@.*test_unmet_rules\.py": "float32", "^decoder/attention:dot_general@": "float32"},
    "primitives": {"tanh": "float32"},
}


@pytest.mark.full
def test_rules_that_match_and_names_of_jax_are_no_reason_to_warn() -> None:
    rules = jt.TORCH_CUDA.replace(**MET)
    assert jnp.isfinite(jt.autocast(loss_fn, rules=rules)(X, X))
    assert jt.explain_autocast(jt.autocast(loss_fn, rules=rules), X, X).unmet == ()
    by_path = jt.autocast(loss_fn, rules=rules.replace(paths={"tanh": "float32"}))
    assert jt.explain_autocast(by_path, X, X).unmet == ("paths: 'tanh'",)


@pytest.mark.parametrize(
    ("table", "name", "nearest"),
    [
        ("paths", "decoder/attnetion", "decoder/attention"),
        ("paths", "encoder/attention$", "decoder/attention"),
        ("functions", "atend", "attend"),
        ("operations", r"attention:dot_general@.*model\.py:31$", r"decoder/attention:dot_general@test_unmet_rules\.py"),
    ],
)
def test_an_entry_that_matches_nothing_is_named(table: str, name: str, nearest: str) -> None:
    rules = jt.TORCH_CUDA.replace(**{**MET, table: {**MET[table], name: "float32"}})
    run = jt.autocast(loss_fn, rules=rules)
    message = (
        rf"(?s)^1 entry of the autocast rules applies to no operation.*{table}: '.*; the nearest is '{nearest}.*tune"
    )
    with pytest.warns(jt.policies.UnmetRulesWarning, match=message) as warned:
        run(X, X)
    assert warned[0].filename == __file__
    run(X, X)  # says it once
    report = jt.explain_autocast(run, X, X)
    (unmet,) = report.unmet
    assert unmet.startswith(f"{table}: {name!r}; the nearest is '{nearest.split('@')[0]}")
    lines = ["entries of the rules that apply to no operation:", f"  {unmet}"]
    assert str(report).splitlines()[-2:] == lines
    policy = dataclasses.replace(jt.get_policy("autocast_float16"), rules=rules)
    assert str(jt.explain_policy(loss_fn, policy, X, X)).splitlines()[-2:] == lines


def attention(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("stem"):
        return jnp.einsum("bij,bjk->bik", *(jnp.stack((y, y)) for y in (x, w))).sum()


def scattered(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.zeros((4, 4)).at[jnp.zeros(4, int)].add(x @ w)


def groups_of_terms(x: jax.Array, w: jax.Array) -> jax.Array:
    numbers = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())
    with jax.named_scope("stem"):
        return jax.lax.ragged_dot_general(x, w, jnp.array([1, 3], jnp.int32), numbers).sum()


def solved(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("stem"):
        return jax.lax.linalg.triangular_solve(w, x).sum()


def layer(x: jax.Array, w: jax.Array) -> jax.Array:
    with jax.named_scope("stem"):
        return x @ w


@pytest.mark.parametrize(
    ("fn", "table", "name", "rule"),
    [
        (attention, "paths", "stem", "fp8"),
        (attention, "primitives", "dot_general", "fp8"),
        (solved, "operations", "stem:triangular_solve", "fp8"),
        pytest.param(groups_of_terms, "paths", "stem", "fp8", marks=pytest.mark.full),
        pytest.param(solved, "paths", "stem", "fp8", marks=pytest.mark.full),
        (scattered, "primitives", "scatter-add", "lower"),
    ],
)
def test_a_rule_that_no_operation_can_take_is_named(fn: Any, table: str, name: str, rule: str) -> None:
    entries: dict[str, Any] = {table: {name: rule}}
    rules = jt.TORCH_CUDA.replace(**entries)
    expected = f"{table}: {name!r}: what it matches cannot be {rule!r}"
    with pytest.warns(jt.policies.UnmetRulesWarning, match=expected):
        jt.autocast(fn, rules=rules)(X, X)
    assert expected in str(jt.explain_autocast(jt.autocast(fn, rules=rules), X, X))
    jt.autocast(lambda x, w: layer(fn(layer(x, w), w) * x, w), rules=jt.TORCH_CUDA.replace(paths={"stem": "fp8"}))(X, X)
