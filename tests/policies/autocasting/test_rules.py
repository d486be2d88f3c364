"""Rules as Python code: run, it gives the rules back, whatever their names.

Rules as files: what is written is read again, bit by bit, and what is wrong with a file is named.
"""

import dataclasses
import os
import re
from pathlib import Path

import pytest
from any_rules import any_rules
from hypothesis import given, settings

import jmp_train as jt
from jmp_train.policies import TORCH_CPU
from jmp_train.policies.autocasting import TORCH_CUDA, Rule, replace_arguments, rules_code

pytestmark = pytest.mark.quick


def run(code: str) -> jt.AutocastRules:
    scope: dict[str, object] = {"jt": jt}
    exec(code, scope)  # noqa: S102 - what users do with it
    rules = scope["rules"]
    assert isinstance(rules, jt.AutocastRules)
    return rules


@settings(deadline=None, max_examples=10)
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


HEAD = 'format = "jmp_train autocast rules"\nversion = 1\n'


@pytest.mark.full
@settings(max_examples=10, deadline=None)
@given(any_rules())
def test_any_rules_come_back(tmp_path_factory: pytest.TempPathFactory, rules: jt.AutocastRules) -> None:
    file = tmp_path_factory.getbasetemp() / "any.toml"
    rules.save(file)
    assert jt.AutocastRules.load(file) == rules
    text = file.read_text()
    assert text.replace("\n", "").isprintable()  # so that nothing that a person does not see is lost in an editor


def test_a_file_as_long_as_the_rules_of_a_large_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(f"{HEAD}# {'x' * 2**21}\n")
    assert jt.AutocastRules.load(tmp_path / "rules.toml") == jt.AutocastRules()


def test_two_entries_for_one_name_stay_in_their_order(tmp_path: Path) -> None:
    rules = jt.AutocastRules(paths=(("b", "lower"), ("a", "float32"), ("b", "keep")))
    rules.save(tmp_path / "rules.toml")
    assert jt.AutocastRules.load(tmp_path / "rules.toml") == rules


def test_a_file_that_a_person_wrote(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    lines = (
        '\ufeff# mine\r\nversion = 1\r\nformat = "jmp_train autocast rules"\r\npaths = [["head", "float32"]] # why',
        "operations = [",
        r"  ['decoder/.*:exp@model\.py:\d+$', 'float32'],  # overflows",
        "]",
    )
    file.write_bytes("\n".join(lines).encode())
    assert jt.AutocastRules.load(file) == jt.AutocastRules(
        paths=(("head", "float32"),), operations=((r"decoder/.*:exp@model\.py:\d+$", "float32"),)
    )


def test_what_was_there_stays_where_writing_fails(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    TORCH_CPU.save(file)
    with pytest.raises(ValueError, match=r"'\\ud800' is half of a surrogate pair"):
        jt.AutocastRules(functions=(("a\ud800", "lower"),)).save(file)
    with pytest.raises(OSError, match="nowhere"):
        TORCH_CUDA.save(tmp_path / "nowhere" / "rules.toml")
    assert jt.AutocastRules.load(file) == TORCH_CPU
    assert os.listdir(tmp_path) == ["rules.toml"]


def test_a_comment_is_for_people_alone(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    TORCH_CUDA.save(file, comment='format = 3\n\n  a\x00b\x1b[31m \udcff "quoted" é\n')
    lines = file.read_text().splitlines()
    assert lines[:3] == ["# format = 3", "#", r'#   a\x00b\x1b[31m \udcff "quoted" é']
    assert jt.AutocastRules.load(file) == TORCH_CUDA
    TORCH_CUDA.save(file)
    assert file.read_text().splitlines() == lines[3:]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[paths", "rules.toml is not a TOML file: "),
        (b"\xff\xfe", "rules.toml is not a TOML file: 'utf-8' codec can't decode"),
        (b"a = " + b"[" * 100_000, "rules.toml is not a TOML file: "),
        (b"", "is not a file of autocast rules: format must be 'jmp_train autocast rules', got none"),
        (b'[fp16]\nmode = "torch"', "is not a file of autocast rules: format must be"),
        (b"format = 3", "is not a file of autocast rules: format must be 'jmp_train autocast rules', got 3"),
        (b'format = "jmp_train autocast rules"', "rules.toml: version must be 1, got none"),
        (HEAD.replace("1", "2").encode(), "rules.toml: version must be 1, got 2"),
        ('path = [["a", "lower"]]', "rules.toml has an unknown table 'path'; choose from primitives, functions, paths"),
        ('paths = "a"', "rules.toml: paths must be a list of pairs such as [\"exp\", \"float32\"], got 'a'"),
        ('[paths]\na = "lower"', "paths must be a list of pairs such as [\"exp\", \"float32\"], got {'a': 'lower'}"),
        ('paths = [["a", "lower"], ["b"]]', "rules.toml: paths: entry 2 must be a pair of strings, such as"),
        ('paths = [["a", 16]]', """entry 1 must be a pair of strings, such as ["exp", "float32"], got ['a', 16]"""),
        ('paths = ["ab"]', "rules.toml: paths: entry 1 must be a pair of strings"),
        (
            'primitives = [["exp", "half"]]',
            "toml: primitives: the rule of 'exp' must be one of lower, float32, promote, demote, keep, fp8, tf32, ",
        ),
        ('paths = [["(", "lower"]]', "rules.toml: paths: '(' is not a regular expression: "),
        ('operations = [["a{9999999999}", "lower"]]', "operations: 'a{9999999999}' is not a regular expression: "),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, content: bytes | str, message: str) -> None:
    file = tmp_path / "rules.toml"
    file.write_bytes(content if isinstance(content, bytes) else f"{HEAD}{content}".encode())
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        jt.AutocastRules.load(file)
    assert str(file) in str(caught.value)
    assert len(str(caught.value)) < len(str(file)) + 300


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"'{tmp_path / 'none.toml'}'")):
        jt.AutocastRules.load(tmp_path / "none.toml")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(ValueError, match=re.escape(f"{path} is not a regular file")):
            jt.AutocastRules.load(path)
