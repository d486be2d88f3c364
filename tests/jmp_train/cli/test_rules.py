"""`--rules FILE` of `train`, `compare` and `diagnose`: who takes them, what names them, and what is refused."""

import argparse
import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import jax
import pytest
from made_runs import make_run

import jmp_train as jt
import jmp_train.runs
from jmp_train.cli import compare as compare_command
from jmp_train.cli import train as train_module
from jmp_train.cli.entry import main
from jmp_train.cli.jobs import read_rules
from jmp_train.runs.events import Run

pytestmark = pytest.mark.quick

RULES = jt.AutocastRules(primitives=(("dot_general", "float32"),), paths=(("head", "keep"),))


@pytest.fixture(name="folder")
def fixture_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    # As tests of what the commands do with their process' environment.
    monkeypatch.setenv("XLA_FLAGS", os.environ.get("XLA_FLAGS", ""))
    RULES.save("rules.toml")
    jt.TORCH_CUDA.save("torch.toml")
    Path("bad.toml").write_text('format = "jmp_train autocast rules"\nversion = 1\npaths = [["a", "half"]]')
    Path("broken.toml").write_text("[")
    Path("config.toml").write_text('[fp16]\nmode = "torch"')
    return tmp_path


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ("train karate --rules none.toml", "--rules none.toml: No such file or directory"),
        ("train karate --rules .", "--rules . is not a regular file"),
        ("train karate --rules /dev/zero", "--rules /dev/zero is not a regular file"),
        ("train karate --rules=", "argument --rules: '' is not a path"),
        ("train karate --rules rules.toml --rules rules.toml", "argument --rules: given more than once"),
        ("train karate --rules broken.toml", "--rules broken.toml is not a TOML file: "),
        ("train karate --rules config.toml", "--rules config.toml is not a file of autocast rules: format must be"),
        (
            "train karate --rules bad.toml",
            "--rules bad.toml: paths: the rule of 'a' must be one of lower, float32, promote, demote, keep, fp8",
        ),
        (
            "train karate --policy mixed_float16 --rules rules.toml",
            "--rules rules.toml: mixed_float16 does not autocast; use autocast_float16, autocast_bfloat16, torch and",
        ),
        ("train karate --mode apex-O2 --rules none.toml", "--rules none.toml: apex-O2 does not autocast; "),
        ("train karate --policy half --rules rules.toml", "--rules rules.toml: half does not autocast; "),
        ("diagnose karate --mode naive --rules rules.toml", "--rules rules.toml: naive does not autocast; "),
        ("diagnose karate --rules bad.toml", "--rules bad.toml: paths: the rule of 'a'"),
        ("compare karate --rules bad.toml", "--rules bad.toml: paths: the rule of 'a'"),
        (
            "compare karate --modes float32 apex-O3 --rules rules.toml",
            "--rules rules.toml: float32, apex-O3 do not autocast; use autocast_float16, ",
        ),
    ],
)
def test_what_cannot_be_is_told_before_anything_is_written(
    call: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *rest = call.split()
    out = ("--checkpoint-dir", "new") if command == "train" else ("--out", "new")
    assert main([command, *rest, *out]) == 2
    printed, error = capsys.readouterr()
    assert (printed, error.count("\n")) == ("", 1)
    assert error.startswith(f"jmp-train: error: {message}")
    assert not (folder / "new").exists()


def test_the_name_of_a_file_can_be_printed_anywhere(folder: Path) -> None:
    file = Path("a\n\x1b[31m\udcff.toml")
    RULES.save(file)
    rules = read_rules(argparse.Namespace(rules=file), ["float32", "torch"])
    assert rules is not None
    assert (rules.name, rules.rules) == (r"a\n\x1b[31m\udcff.toml", RULES)
    assert read_rules(argparse.Namespace(rules=None), ["float32"]) is None


@pytest.mark.parametrize("options", [("--json",), ()])
def test_train_hands_the_rules_on_and_names_the_file(
    options: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(prepared: Any, state: object, *, on_event: Any, **others: object) -> Run:
        rules = prepared.settings.rules
        assert rules.rules == RULES
        run = dataclasses.replace(make_run(prepared.name), rules=rules.name)
        on_event(run)
        return run

    monkeypatch.setattr(train_module, "train_prepared", train)
    assert main(["train", "karate", "--mode", "apex-O1", "--rules", "rules.toml", *options]) == 0
    last = capsys.readouterr().out.splitlines()[-1]
    if options:
        assert json.loads(last)["rules"] == "rules.toml"
    else:
        assert last == "apex-O1: autocast by the rules of rules.toml"


def test_compare_gives_rules_to_those_that_autocast_and_the_report_names_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands = {}

    def run_in_process(args: argparse.Namespace, name: str, display: object) -> Run:
        commands[name] = compare_command._command(args, name)
        return dataclasses.replace(make_run(name), rules="rules.toml" if name != "float32" else None)

    monkeypatch.setattr(compare_command, "_run_in_process", run_in_process)
    call = ("compare", "karate", "--policies", "float32", "autocast_bfloat16", "torch", "--rules", "rules.toml")
    assert main([*call, "--out", "out"]) == 0
    given = {name: [text for text in command if text.startswith("--rules")] for name, command in commands.items()}
    assert given == {"float32": [], "autocast_bfloat16": ["--rules=rules.toml"], "torch": ["--rules=rules.toml"]}
    said = [line for line in capsys.readouterr().out.splitlines() if "by the rules" in line]
    assert said == [f"{name}: autocast by the rules of rules.toml" for name in ("autocast_bfloat16", "torch")]
    page = Path("out/report.html").read_text()
    assert all(f"<p>{line}</p>" in page for line in said)
    runs = json.loads(Path("out/report.json").read_text())["runs"]
    assert [run.get("rules", "none") for run in runs] == ["none", "rules.toml", "rules.toml"]


@pytest.mark.full
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore::jmp_train.policies.UnmetRulesWarning")  # karate has no head
def test_a_run_with_rules_goes_on_with_the_same_rules_only(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("train", "karate", "--epochs", "2", "--checkpoint-dir", "run", "--json")
    with jax.numpy_dtype_promotion("standard"):  # as in a user's process
        assert main([*run, "--rules", "rules.toml"]) == 0
        final = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert final["rules"] == "rules.toml"
        assert final["costs"]["half_flops_share"] < 0.1
        metadata = json.loads(Path("run/run.json").read_text())
        assert metadata["rules_file"] == str(folder / "rules.toml")
        for other, said in (("torch.toml", "this call [0-9a-f]{16}"), (None, "this call the default")):
            assert main([*run, "--resume", *(("--rules", other) if other else ())]) == 2
            pattern = rf"is of another run:\n  rules: the run has {metadata['run']['rules']}, {said}\n"
            assert re.search(pattern, capsys.readouterr().err)
        Path("rules.toml").rename("moved.toml")
        assert main([*run, "--resume", "--rules", "moved.toml"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["rules"] == "moved.toml"

        diagnose = ("diagnose", "karate", "--epochs", "2", "--rules", "moved.toml")
        assert main([*diagnose, "--checkpoint-dir", "run", "--json"]) in (0, 3)
        found = json.loads(capsys.readouterr().out)
        assert list(found)[:4] == ["task", "policy", "rules", "step"]
        assert (found["rules"], found["step"]) == ("moved.toml", 2)
        products = [row for row in found["rows"] if row["primitive"] == "dot_general"]
        assert {row["dtype"] for row in products} == {"float32"}
        assert main([*diagnose]) in (0, 3)
        assert capsys.readouterr().out.startswith("karate, autocast_float16, rules of moved.toml, step 0:\n")
