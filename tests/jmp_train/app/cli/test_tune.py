"""`jmp-train tune`: what it prints, writes and returns, and that `train --rules` takes its file."""

import dataclasses
import json
import os
import re
import types
from pathlib import Path
from typing import Any

import pytest

import jmp_train as jt
from jmp_train.app.cli import tune as command
from jmp_train.app.cli.entry import main
from jmp_train.tools.tuning import Errors, Float32Entry, Verification

pytestmark = pytest.mark.quick

ENTRY = Float32Entry(("^net:exp@",), ("exp",), "net", "model.py:3", 2, Errors(False, 0.1, 0.2, 0.3, 0.9))
TUNED = jt.tuning.TunedRules(
    rules=jt.MOSTLY_HALF.replace(operations={"^net:exp@": "float32"}), dtype="bfloat16", entries=(ENTRY,), choices=9,
    complete=True, trials=4, seconds=0.5, compile_seconds=3.0, loss_scale=1.0, tolerance=jt.tuning.Tolerance(),
    half_flops=(0.5, 0.9), half_elements=(0.4, 0.8),
    verification=Verification(True, Errors(True, 0.001, 0.02, 0.1, 1.0), 1),
)  # fmt: skip


@pytest.fixture(name="calls")
def fixture_calls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """A folder with a file, and a `tune` that takes no time, whose keyword arguments it notes."""
    (folder / "file").write_text("as it was")
    (folder / "folder").mkdir()
    calls: list[dict[str, Any]] = []

    def tune(step: object, examples: list[Any], **options: Any) -> jt.tuning.TunedRules:
        calls.append({"step": step, "examples": len(examples), **options})
        return TUNED

    state = types.SimpleNamespace(step=7)
    monkeypatch.setattr(command, "_examples", lambda call: ("the step", [(state, {})] * (call.options.examples or 4)))
    monkeypatch.setattr(command, "tune", tune)
    return calls


def test_the_rules_and_the_page_are_written(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--dtype", "bfloat16", "--examples", "3", "--budget", "50", "--steps", "0", "--tolerance", "1e-2")
    assert main(["tune", "karate:task", *options, "--out", "made/rules.toml", "--page", "made/too/page.html"]) == 0
    assert calls == [
        {"step": "the step", "examples": 3, "dtype": "bfloat16", "tolerance": 0.01, "budget": 50, "steps": 0,
         "progress": None, "recipe": None}
    ]  # fmt: skip
    out, error = capsys.readouterr()
    lines = out.splitlines()
    assert lines == [
        "karate:task, bfloat16, step 7:", *str(TUNED).splitlines(), "wrote made/rules.toml", "wrote made/too/page.html",
    ]  # fmt: skip
    assert error == ""
    assert jt.AutocastRules.load("made/rules.toml") == TUNED.rules
    comment = [line for line in Path("made/rules.toml").read_text().splitlines() if line.startswith("# ")]
    assert comment[:3] == [
        "# jmp-train tune: karate:task, bfloat16, step 7", "# task karate:task, step 7, examples 3",
        "# tolerance: loss 0.01, gradient 0.05, leaf 0.25, cosine 0.8",
    ]  # fmt: skip
    assert "#   exp  net  model.py:3  without it: not finite" in comment
    assert "<title>karate:task, bfloat16, step 7</title>" in Path("made/too/page.html").read_text()


def test_without_a_file_the_rules_are_printed(calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "karate:task"]) == 0
    assert capsys.readouterr().out.endswith(f"{TUNED.code()}\n")
    assert {name: calls[0][name] for name in ("dtype", "tolerance", "steps")} == {
        "dtype": "float16", "tolerance": None, "steps": 20,
    }  # fmt: skip


def test_json_is_all_that_standard_output_gets(calls: list[dict[str, Any]], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "karate:task", "--json", "--out", "rules.toml"]) == 0
    out, error = capfd.readouterr()
    found = json.loads(out)
    assert {name: found[name] for name in ("task", "step", "examples", "dtype", "code")} == {
        "task": "karate:task", "step": 7, "examples": 4, "dtype": "bfloat16", "code": TUNED.code(),
    }  # fmt: skip
    assert found == {"task": "karate:task", "step": 7, "examples": 4, **json.loads(json.dumps(TUNED.to_json()))}
    assert "wrote rules.toml" in error


def test_rules_that_do_not_hold_are_written_and_exit_with_3(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = dataclasses.replace(TUNED, verification=dataclasses.replace(TUNED.verification, passed=False))
    monkeypatch.setattr(command, "tune", lambda *args, **options: failed)
    assert main(["tune", "karate:task", "--out", "rules.toml"]) == 3
    assert "under autocast itself it does not hold" in capsys.readouterr().out
    assert "does not hold" in Path("rules.toml").read_text()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--out folder", "--out folder: it is not a regular file"),
        ("--page /dev/null", "--page /dev/null: it is not a regular file"),
        ("--out file/rules.toml", "--out file/rules.toml: Not a directory"),
        ("--out made/rules.toml --page file/x/page.html", "--page file/x/page.html: Not a directory"),
        ("--out both --page ./both", "--out and --page are both both"),
        ("--dtype float32", "argument --dtype: invalid choice: 'float32'"),
        ("--tolerance 0", "argument --tolerance: '0' is not a number above 0"),
        ("--tolerance 1e999", "argument --tolerance: '1e999' is not a number above 0"),
        ("--examples 0", "argument --examples: '0' is not a whole number of at least 1"),
        ("--policy float32", "unrecognized arguments: --policy float32"),
    ],
)
def test_what_cannot_be_is_told_before_anything_runs(
    options: str, message: str, calls: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", "karate:task", *options.split()]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("jmp-train: error: ")
    assert message in error
    assert calls == []
    assert sorted(os.listdir()) == ["file", "folder"]
    assert Path("file").read_text() == "as it was"


def test_a_failure_leaves_no_folder_and_no_file(
    calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*args: object, **options: object) -> None:
        raise ValueError("examples[0]: result 0 is not finite in float32")

    monkeypatch.setattr(command, "tune", fail)
    assert main(["tune", "karate:task", "--out", "made/rules.toml", "--page", "file"]) == 1
    assert capsys.readouterr().err == "jmp-train: error: examples[0]: result 0 is not finite in float32\n"
    assert sorted(os.listdir()) == ["file", "folder"]
    assert Path("file").read_text() == "as it was"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--devices 2", "--devices 2: tune runs on one device"),
        ("--epochs 3 --after 4", "--after 4: the run has 3 steps"),
        ("--epochs 3 --after 1 --examples 3", "--after 1 --examples 3: the run has 3 steps"),
        ("--epochs 3 --checkpoint-dir nowhere", "--checkpoint-dir nowhere is not a folder"),
    ],
)
@pytest.mark.timeout(200)
def test_what_a_run_does_not_have_is_told(
    options: str, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = "digits" if "devices" in options else "karate:task"
    assert main(["tune", task, *options.split(), "--out", "made/rules.toml"]) == 2
    assert capsys.readouterr().err == f"jmp-train: error: {message}\n"
    assert os.listdir() == []


@pytest.mark.full
@pytest.mark.timeout(600)
def test_train_takes_the_rules_that_digits_need(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("digits", "--train-size", "640", "--epochs", "2")
    options = ("--tolerance", "0.015", "--steps", "3", "--after", "2", "--out", "rules.toml", "--page", "page.html")
    assert main(["tune", *run, *options]) == 0
    out = capsys.readouterr().out
    count = re.search(r"^digits, float16, step 2:\n(\d+) entr\w+ in float32 of", out)
    assert count is not None
    assert int(count[1]) > 0
    rules = jt.AutocastRules.load("rules.toml")
    assert len(rules.operations) >= int(count[1])
    assert Path("page.html").read_text().count("<svg") == 2

    assert main(["train", *run, "--policy", "autocast_float16", "--rules", "rules.toml", "--json"]) == 0
    final = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (final["event"], final["rules"]) == ("run", "rules.toml")
    assert final["steps"][-1]["finite"]
    assert 0.2 < final["costs"]["half_flops_share"] < 0.95  # 0.98 by the rules of autocast_float16


@pytest.mark.full
@pytest.mark.timeout(600)
def test_the_state_of_a_checkpoint_is_tuned(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("karate:task", "--epochs", "3")
    found = []
    assert main(["train", *run, "--policy", "float32", "--checkpoint-dir", "saved", "--json"]) == 0
    for state in (("--checkpoint-dir", "saved"), ("--after", "3")):
        capsys.readouterr()
        assert main(["tune", *run, *state, "--dtype", "bfloat16", "--steps", "0", "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert main(["tune", *run, "--checkpoint-dir", "saved", "--after", "1"]) == 2
    assert "--after 1: the run has 3 steps, and 3 are done" in capsys.readouterr().err
    saved, trained = ({k: x for k, x in f.items() if not k.endswith("seconds")} for f in found)
    assert saved == trained
    assert (saved["step"], saved["examples"]) == (3, 1)
