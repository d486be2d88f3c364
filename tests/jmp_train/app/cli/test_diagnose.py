"""`jmp-train diagnose` of tasks and of scripts: what they print, write and return."""

import json
import os
import sys
from pathlib import Path

import pytest

from jmp_train.app.cli.entry import main

pytestmark = pytest.mark.quick

SCRIPT = """
import jax.numpy as jnp
from numbers_of_the_user import LARGE

def squares(x):
    return jnp.sum(x * x)

def make_step():
    print("made")
    return squares, jnp.full(3, LARGE, jnp.float16)

def harmless():
    return squares, jnp.ones(3, jnp.float16)

def number():
    return 3

def nothing():
    return ()

def arrays():
    return jnp.ones(3), squares

def fails():
    return {}["no key"]

def wrong_arguments():
    return squares, jnp.ones(3), 4

constant = 3

if __name__ == "__main__":
    raise SystemExit("was run")
"""


@pytest.fixture(autouse=True)
def scripts(folder: Path) -> None:
    Path("scripts").mkdir()
    Path("scripts/numbers_of_the_user.py").write_text("LARGE = 300.0")
    Path("scripts/model.py").write_text(SCRIPT)
    Path("scripts/ends.py").write_text("import sys\nsys.exit(5)")


def check_schema(found: dict[str, object], subject: dict[str, object]) -> None:
    assert list(found) == [*subject, "problems", "rows", "collapsed", "steps", "explanation"]
    assert {name: found[name] for name in subject} == subject


@pytest.mark.full
def test_a_step_of_a_schedule_is_diagnosed_in_its_phase(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    call = ["karate:task", "--policy", "mixed_float16,0.5:float32", "--epochs", "4"]
    saved = [*call, "--checkpoint-dir", "saved"]
    assert main(["train", *saved]) == 0
    capsys.readouterr()
    for options, step, phase in (
        (call, 0, "mixed_float16"),
        ([*call, "--after", "2"], 2, "float32"),
        (saved, 4, "float32"),
    ):
        main(["diagnose", *options])
        title, summary = capsys.readouterr().out.splitlines()[:2]
        assert title == f"karate:task, {call[2]}, step {step} ({phase}):"
        assert (", 0 of them in half precision" in summary) == (phase == "float32")
    main(["diagnose", *saved, "--json"])
    found = json.loads(capsys.readouterr().out)
    check_schema(found, {"task": "karate:task", "policy": call[2], "phase": "float32", "step": 4})


def test_a_script_is_diagnosed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "scripts/model.py:make_step", "--out", "made/out"]) == 3
    out, error = capsys.readouterr()
    lines = out.splitlines()
    assert lines[:5] == [
        "made", "scripts/model.py:make_step:", "1 problem in 3 operations, 2 of them in half precision",
        "Results are not finite, which begins with the overflow at scripts/model.py:6.",
        "problem: overflow, forward pass, scripts/model.py:6",
    ]  # fmt: skip
    assert lines[-2:] == ["wrote made/out/diagnosis.html", "wrote made/out/diagnosis.json"]
    assert max(map(len, lines)) <= 100
    assert error == ""
    page = Path("made/out/diagnosis.html").read_text()
    assert "<title>scripts/model.py:make_step</title>" in page
    assert "return jnp.sum(x * x)" in page
    check_schema(json.loads(Path("made/out/diagnosis.json").read_text()), {"function": "scripts/model.py:make_step"})


def test_json_is_all_that_standard_output_gets(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", f"{folder}/scripts/model.py:make_step", "--json", "--steps", "1"]) == 3
    out, error = capfd.readouterr()
    found = json.loads(out)
    check_schema(found, {"function": f"{folder}/scripts/model.py:make_step"})
    assert [problem["kind"] for problem in found["problems"]] == ["overflow"]
    assert "made" in error


def test_a_script_without_problems(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", "scripts/model.py:harmless"]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("no problems in ")


@pytest.mark.parametrize(
    ("function", "code", "message"),
    [
        ("scripts/model.py", 2, "scripts/model.py has no function 'task': it has squares, make_step"),
        ("nowhere.py:make_step", 2, "nowhere.py is not a file"),
        ("scripts/model.py:constant", 2, "model.py:constant must be a function that returns a jt.Task, got a int"),
        (
            "scripts/model.py:number",
            2,
            "scripts/model.py:number returned a value of type int; it must return a jt.Task",
        ),
        ("scripts/model.py:nothing", 2, "scripts/model.py:nothing returned an empty tuple; it must return"),
        ("scripts/model.py:arrays", 2, "arrays returned a tuple whose first item is of type ArrayImpl; it must return"),
        ("scripts/model.py:fails", 2, "scripts/model.py:25: KeyError: 'no key'"),
        ("scripts/model.py:wrong_arguments", 1, "TypeError: squares() takes 1 positional argument"),
        ("scripts/ends.py:make_step", 2, "scripts/ends.py:2: it calls sys.exit(5); move code that runs as a"),
    ],
)
def test_what_is_wrong_with_a_script(
    function: str, code: int, message: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", function, "--out", "made/out"]) == code
    *others, line = capsys.readouterr().err.splitlines()
    assert line.startswith("jmp-train: error: ")
    assert message in line
    assert not others
    assert not Path("made").exists()


def test_a_script_may_have_the_name_of_a_module_that_is_there(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("scripts/json.py").write_text(SCRIPT)
    assert main(["diagnose", "scripts/json.py:number"]) == 2
    assert "returned a value of type int" in capsys.readouterr().err
    assert sys.modules["json"] is json


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_task_is_diagnosed_from_the_start_later_and_from_a_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ("karate:task", "--policy", "mixed_float16", "--epochs", "3")
    assert main(["diagnose", *run, "--out", "out"]) == 0
    title, first, *lines = capsys.readouterr().out.splitlines()
    assert title == "karate:task, mixed_float16, step 0:"
    assert first.startswith("no problems in ")
    assert lines == ["wrote out/diagnosis.html", "wrote out/diagnosis.json"]
    found = json.loads(Path("out/diagnosis.json").read_text())
    check_schema(found, {"task": "karate:task", "policy": "mixed_float16", "step": 0})
    assert {row["direction"] for row in found["rows"]} == {"forward", "backward", "update"}

    assert main(["train", *run, "--checkpoint-dir", "saved", "--json"]) == 0
    capsys.readouterr()
    assert main(["diagnose", *run, "--checkpoint-dir", "saved", "--json"]) == 0
    saved = json.loads(capsys.readouterr().out)
    assert main(["diagnose", *run, "--after", "3", "--json"]) == 0
    trained = json.loads(capsys.readouterr().out)
    check_schema(saved, {"task": "karate:task", "policy": "mixed_float16", "step": 3})
    assert saved == trained
    assert saved["rows"] != found["rows"]

    assert main(["diagnose", *run, "--checkpoint-dir", "saved", "--after", "1"]) == 2
    assert "--after 1: the run has 3 steps, and 3 are done" in capsys.readouterr().err
    assert main(["diagnose", *run, "--seed", "1", "--checkpoint-dir", "saved"]) == 2
    assert "saved is of another run:\n  seed: the run has 0, this call 1" in capsys.readouterr().err
    assert sorted(os.listdir("out")) == ["diagnosis.html", "diagnosis.json"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_a_skipped_step_is_diagnosed_from_its_capsule(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = ("digits", "--mode", "naive", "--epochs", "2", "--train-size", "640", "--growth-interval", "2")
    assert main(["train", *run, "--capsules", "capsules", "--json"]) == 0
    final = json.loads(capsys.readouterr().out.splitlines()[-1])
    last = max(os.listdir("capsules"))
    before = final["steps"][: int(last[5:13])]
    assert any(step["finite"] for step in before)  # so that parameters are no more the first
    code = main(["diagnose", *run, "--capsule", f"capsules/{last}", "--json"])
    found = json.loads(capsys.readouterr().out)
    check_schema(found, {"task": "digits", "policy": "naive", "step": len(before)})
    overflows = [problem for problem in found["problems"] if problem["kind"] == "overflow"]
    scale = before[-1]["loss_scale"]  # the one that the next step uses
    assert any(f"without the loss scale of {scale:g} they reach" in problem["evidence"] for problem in overflows)
    assert all(problem["direction"] == "backward" for problem in overflows)
    assert all(problem["code"] for problem in overflows)
    assert code == (3 if any(problem["severity"] == "problem" for problem in found["problems"]) else 0)

    assert main(["diagnose", *run, "--after", "0", "--capsule", f"capsules/{last}"]) == 2
    error = capsys.readouterr().err
    assert f"capsules/{last} is of step {found['step']} and needs the parameters and model state" in error
