"""Entries of rules that match nothing are named when autocast first traces, and in its report.

Names in rules that jax does not have are refused with the nearest ones; names of users' own functions are not.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import pytest
from jax.interpreters import batching

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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exponential",
            r"primitives: jax has no primitive 'exponential'; the nearest are 'exp'\. .* functions=\{'expo",
        ),
        ("tahn", "no primitive 'tahn'; the nearest are .*'tanh'"),
        ("dot", "no primitive 'dot'; the nearest are 'dot_general'"),
        ("conv", "no primitive 'conv'; the nearest are 'conv_general_dilated'"),
        ("softmax", r"no primitive 'softmax'.*'softmax' is a function of jax: functions=\{'softmax': \.\.\.\}"),
    ],
)
def test_a_primitive_that_jax_does_not_have_is_refused(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        jt.TORCH_CUDA.replace(primitives={name: "float32"})
    file = tmp_path / "rules.toml"
    file.write_text(f'format = "jmp_train autocast rules"\nversion = 1\nprimitives = [["{name}", "float32"]]\n')
    with pytest.raises(ValueError, match=f"rules.toml: .*{message}"):
        jt.AutocastRules.load(file)


@pytest.mark.parametrize("name", ["pallas_call", "pjit", "scatter-add", "scatter_add", "random_bits", "all_gather"])
def test_primitives_of_jax_are_known_in_all_its_releases(name: str) -> None:
    assert (name, "keep") in jt.TORCH_CUDA.replace(primitives={name: "keep"}).primitives


def test_a_primitive_of_an_extension_is_known() -> None:
    own = jex.Primitive("exponential_of_mine")
    with pytest.raises(ValueError, match="no primitive 'exponential_of_mine'"):
        jt.AutocastRules(primitives=((own.name, "keep"),))
    batching.primitive_batchers[own] = lambda operands, axes: (own.bind(*operands), axes[0])
    try:
        assert jt.AutocastRules(primitives=((own.name, "keep"),)).primitives == (("exponential_of_mine", "keep"),)
    finally:  # jax keeps it for the whole process, where errors of other tests would propose its name
        del batching.primitive_batchers[own]


@pytest.mark.parametrize(
    ("name", "near"),
    [("log_softmaks", "log_softmax"), ("lognsumexp", "logsumexp"), ("dot_product_atention", "dot_product_attention")],
)
def test_a_slip_in_the_name_of_a_function_is_refused(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=f"functions: jax has no function '{name}'; the nearest are '{near}'"):
        jt.TORCH_CUDA.replace(functions={name: "float32"})
    with pytest.raises(ValueError, match=r"jax has no module 'jax.numpy.linlag'; the nearest are 'linalg'"):
        jt.TORCH_CUDA.replace(functions={"jax.numpy.linlag": "float32"})


@pytest.mark.parametrize(
    "name",
    ["attend", "geglu", "my_softmax", "softmax2", "log_soft_max", "_log_softmax", "rms_norm", "multi_head_attention",
     "cross_entropy", "jax.nn.functions", "jax.scipy.stats", "logsumexp"],
)  # fmt: skip
def test_other_names_may_be_those_of_a_users_functions(name: str) -> None:
    assert dict(jt.TORCH_CUDA.replace(functions={name: "float32"}).functions)[name] == "float32"
