"""Rules for single operations, and those that demote: which operations they reach, and what they leave alone."""

import inspect
import sys
import warnings
from types import FrameType

import jax
import jax.numpy as jnp
import pytest

from jmp_train import MOSTLY_HALF, TORCH_CUDA, AutocastRules, autocast, explain_autocast
from jmp_train.policies import AutocastReport, UnmetRulesWarning

pytestmark = pytest.mark.quick

F16, F32 = jnp.float16, jnp.float32
X = jax.ShapeDtypeStruct((4, 4), jnp.float32)


def rows_of(fn, rules: AutocastRules, *args) -> AutocastReport:
    return explain_autocast(autocast(fn, F16, rules=rules), *args)


def rules_of(fn, rules: AutocastRules, *args) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for row in rows_of(fn, rules, *args).operations:
        found.setdefault(row.operation, []).append(row.rule)
    return found


def two_scopes(x, w):
    with jax.named_scope("first"):
        x = jnp.tanh(x @ w)
    with jax.named_scope("second"):
        return jnp.tanh(x @ w)


def two_lines(x, w):
    x = jnp.tanh(x @ w)
    return jnp.tanh(x @ w)


def test_an_operation_is_found_by_its_path_and_primitive():
    rules = TORCH_CUDA.replace(operations={"^second:dot_general@": "float32"})
    assert rules_of(two_scopes, rules, X, X)["dot_general"] == ["lower", "float32"]


def test_an_operation_is_found_by_its_line():
    line = inspect.getsourcelines(two_lines)[1] + 2
    rules = TORCH_CUDA.replace(operations={rf":dot_general@.*test_operations\.py:{line}$": "float32"})
    assert rules_of(two_lines, rules, X, X)["dot_general"] == ["lower", "float32"]


def test_library_code_is_found_by_the_users_line_too():
    import optax

    def losses(x, y):
        first = optax.l2_loss(x @ y).mean()
        return first + optax.l2_loss(x @ x).mean()

    line = inspect.getsourcelines(losses)[1] + 2
    rules = MOSTLY_HALF.replace(operations={rf"optax.* from .*test_operations\.py:{line}$": "float32"})
    reasons = [row.reason for row in rows_of(losses, rules, X, X).operations]
    assert 0 < sum(reason.startswith("operation ") for reason in reasons) < len(reasons) / 2


def test_programs_are_no_operations():
    def nested(x):
        return jax.jit(lambda x: jnp.exp(x @ x))(x)

    rules = TORCH_CUDA.replace(operations={":jit@": "float32", ":pjit@": "float32"})
    assert rules_of(nested, rules, X) == {"dot_general": ["lower"], "exp": ["float32"]}


def test_one_function_called_twice_has_two_addresses():
    inner = jax.jit(lambda x: jnp.sin(x @ x))

    def calls(x):
        with jax.named_scope("a"):
            x = inner(x)
        with jax.named_scope("b"):
            return inner(x)

    rules = MOSTLY_HALF.replace(operations={"^a:": "float32"})
    assert rules_of(calls, rules, X) == {"dot_general": ["float32", "lower"], "sin": ["float32", "demote"]}


def test_operations_come_before_paths_and_the_new_ones_first():
    rules = TORCH_CUDA.replace(paths={"first": "float32"}, operations={"^first:tanh@": "lower"})
    assert rules_of(two_scopes, rules, X, X)["tanh"][0] == "lower"
    rules = rules.replace(operations={"tanh": "float32"})
    assert rules.operations == (("tanh", "float32"), ("^first:tanh@", "lower"))


@pytest.mark.parametrize("name", ["mul", "add", "max", "atan2"])
def test_demote_lowers_what_meets_half_and_nothing_else(name):
    rules = MOSTLY_HALF.replace(primitives={name: "demote"})
    operation = {"mul": jnp.multiply, "add": jnp.add, "max": jnp.maximum, "atan2": jnp.arctan2}[name]
    run = autocast(lambda x, w: (operation(x @ w, w), operation(x, w)), F16, rules=rules)
    assert [y.dtype for y in run(jnp.ones((2, 2)), jnp.ones((2, 2)))] == [F16, F32]


def test_demote_leaves_a_moving_average_in_float32():
    def step(average, x, w):
        h = x @ w
        return 0.99 * average + 0.01 * h.mean(0), jnp.exp(h)

    average, h = autocast(step, F16, rules=MOSTLY_HALF)(jnp.ones(2), jnp.ones((2, 2)), jnp.ones((2, 2)))
    assert (average.dtype, h.dtype) == (F32, F16)


def test_demote_keeps_literals_and_integers_that_half_cannot_hold():
    def masked(x, w):
        return (x @ w) + 1e9, (x @ w) + jnp.arange(4000.0, dtype=jnp.float32)[:, None]

    results = autocast(masked, F16, rules=MOSTLY_HALF)(jnp.ones((4000, 2)), jnp.ones((2, 2)))
    assert [y.dtype for y in results] == [F32, F32]


def test_expressions_are_compiled_once_in_tables_of_any_length() -> None:
    rules = TORCH_CUDA.replace(operations={f"layer_{i}:dot_general": "float32" for i in range(600)})
    compiled: list[str] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_name == "compile" and frame.f_code.co_filename.endswith("_compiler.py"):
            compiled.append(frame.f_locals["p"])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmetRulesWarning)
        fn = autocast(lambda x: jnp.tanh(jnp.sin(x @ x) + jnp.exp(x)), rules=rules)
        fn(jnp.ones((2, 2)))
        sys.setprofile(note)
        try:
            fn(jnp.ones((3, 3)))
        finally:
            sys.setprofile(None)
    assert not [text for text in compiled if text.startswith("layer_")]
