"""Rules as Python code: run, it gives the rules back, whatever their names."""

import dataclasses

import pytest
from any_rules import any_rules
from hypothesis import given, settings

import jmp_train as jt
from jmp_train.policies.autocasting import Rule, replace_arguments, rules_code

pytestmark = pytest.mark.quick


def run(code: str) -> jt.AutocastRules:
    scope: dict[str, object] = {"jt": jt}
    exec(code, scope)  # noqa: S102 - what users do with it
    rules = scope["rules"]
    assert isinstance(rules, jt.AutocastRules)
    return rules


@settings(deadline=None, max_examples=5)
@given(any_rules())
def test_the_code_of_any_rules_gives_them_back(rules: jt.AutocastRules) -> None:
    code = rules_code(rules, "jt.AutocastRules()")
    line = f"rules = jt.AutocastRules().replace({replace_arguments(rules)})"
    if rules == jt.AutocastRules():
        assert code == replace_arguments(rules) == ""
    else:
        assert run(code) == run(line) == rules
        assert line.isprintable()


def test_a_long_table_has_a_line_an_entry() -> None:
    entries: dict[str, Rule] = {rf"decoder/layers\.{i}:exp@model\.py:{i}$": "float32" for i in range(3)}
    rules = jt.AutocastRules(operations=tuple(entries.items()), primitives=(("exp", "lower"),))
    lines = rules_code(rules).splitlines()
    assert lines[:5] == [
        "rules = jt.TORCH_CUDA.replace(",
        '    primitives={"exp": "lower"},',
        "    operations={",
        r'        r"decoder/layers\.0:exp@model\.py:0$": "float32",',
        r'        r"decoder/layers\.1:exp@model\.py:1$": "float32",',
    ]
    assert lines[-2:] == ["    },", ")"]
    assert run(rules_code(rules)) == jt.TORCH_CUDA.replace(
        **{field.name: dict(getattr(rules, field.name)) for field in dataclasses.fields(rules)}
    )


def test_of_two_entries_for_one_name_the_one_that_counts_is_written() -> None:
    twice: tuple[tuple[str, Rule], ...] = (("exp", "lower"), ("exp", "float32"))
    rules = jt.AutocastRules(primitives=twice, paths=twice)
    assert replace_arguments(rules) == 'primitives={"exp": "float32"}, paths={"exp": "lower"}'
