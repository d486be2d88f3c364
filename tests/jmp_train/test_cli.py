import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jmp_train import cli
from jmp_train.cli import main

COMMAND = (sys.executable, "-m", "jmp_train")


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*COMMAND, *args), capture_output=True, text=True, timeout=240, cwd=cwd, check=False
    )


def check_schema(report: Any, policies: list[str], epochs: int) -> None:
    assert set(report) == {"task", "runs"}
    assert report["task"] == "digits"
    assert [entry["policy"] for entry in report["runs"]] == policies
    for entry in report["runs"]:
        assert set(entry) == {"policy", "test_accuracy", "epochs"}
        assert 0.5 < entry["test_accuracy"] <= 1
        assert [epoch["epoch"] for epoch in entry["epochs"]] == list(range(1, epochs + 1))
        for epoch in entry["epochs"]:
            assert set(epoch) == {
                "epoch", "loss", "seconds", "memory_mb", "loss_scale", "skipped_steps",
            }  # fmt: skip
            assert epoch["loss"] > 0 < epoch["seconds"] < 100 < epoch["memory_mb"]


@pytest.mark.timeout(300)
def test_compare_prints_a_line_an_epoch_a_table_and_writes_the_report(tmp_path: Path) -> None:
    policies = ["float32", "mixed_float16"]
    result = run(
        "compare", "digits", "--policies", *policies, "--epochs", "2", "--out", "a/b", cwd=tmp_path
    )
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0].split()[0] for line in lines[:4]] == [
        p for p in policies for _ in "12"
    ]
    for line in lines[:4]:
        for part in ("epoch", "loss", "learning rate", " s ", "peak memory", "skipped steps"):
            assert part in line
    assert any("test accuracy" in line and "memory" in line for line in lines[5:])
    assert "memory: peak of the process" in result.stdout
    check_schema(json.loads((tmp_path / "a/b/report.json").read_text()), policies, epochs=2)
    assert [path.name for path in (tmp_path / "a/b").iterdir()] == ["report.json"]


@pytest.mark.timeout(300)
def test_compare_json_and_a_run_that_fails(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("earlier")
    result = run(
        "compare", "--policies", "float64", "bf16", "--epochs", "1", "--json", "--out", ".",
        cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == (
        "jmp-train: error: float64: policy 'float64' has float64, which needs JAX_ENABLE_X64=1"
    )
    check_schema(json.loads(result.stdout), ["bf16"], epochs=1)
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(result.stdout)


@pytest.mark.timeout(300)
def test_a_report_is_not_lost_to_runs_that_all_fail(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("earlier")
    result = run("compare", "--policies", "float64", "--out", ".", cwd=tmp_path)
    assert result.returncode == 1
    assert (tmp_path / "report.json").read_text() == "earlier"


@pytest.mark.timeout(300)
def test_train_json_is_a_line_an_epoch_and_the_run(tmp_path: Path) -> None:
    result = run("train", "--policy", "mixed_bfloat16", "--epochs", "2", "--json", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    *epochs, final = [json.loads(line) for line in result.stdout.splitlines()]
    assert [epoch["epoch"] for epoch in epochs] == [1, 2]
    assert all(epoch["learning_rate"] >= 0 for epoch in epochs)
    assert final.pop("memory_of") == "process"
    check_schema({"task": "digits", "runs": [final]}, ["mixed_bfloat16"], epochs=2)


@pytest.mark.timeout(300)
def test_interrupting_compare_stops_the_run(tmp_path: Path) -> None:
    process = subprocess.Popen(
        (*COMMAND, "compare", "--epochs", "100000"), stdout=subprocess.PIPE, text=True, cwd=tmp_path
    )
    assert process.stdout is not None
    assert "epoch" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=60) == 130
    process.stdout.close()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["train", "nosuch"], "argument task: invalid choice: 'nosuch'"),
        (["train", "--policy", "float31"], "argument --policy: Unknown dtype 'float31'"),
        (["compare", "--policies", "float32", "c=x"], "argument --policies: Unknown dtype 'x'"),
        (["train", "--epochs", "0"], "'0' is not a whole number of at least 1"),
        (["train", "--batch-size", "-3"], "argument --batch-size: '-3' is not a whole number"),
        (["train", "--seed", "x"], "'x' is not a whole number of at least 0"),
    ],
)
def test_wrong_calls_are_one_line_and_exit_with_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_batch_too_large_is_found_before_anything_runs(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert main(["compare", "--batch-size", "1438", "--out", str(out)]) == 1
    assert capsys.readouterr().err == (
        "jmp-train: error: batch_size=1438 must lie between 1 and the 1437 training rows\n"
    )
    assert not out.exists()


def test_an_output_folder_that_cannot_be_made_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert main(["compare", "--out", str(out)]) == 1
    assert capsys.readouterr().err == f"jmp-train: error: --out {out}: Not a directory\n"


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["train"]) == 1
    assert "this needs the package sklearn.datasets: pip install 'jmp_train[train]'" in (
        capsys.readouterr().err
    )


def test_the_reason_of_a_died_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli._reason(-9, "") == "killed by signal 9"
    assert cli._reason(1, "Traceback\nboom\n") == "ended with exit code 1"
    assert "boom" in capsys.readouterr().err
    assert cli._reason(1, "warning\njmp-train: error: why\n") == "why"


def test_the_environment_of_a_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--xla_cpu_experimental_ynn_fusion_type="
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    cli._turn_ynn_fusion_off()
    cli._turn_ynn_fusion_off()
    assert os.environ["XLA_FLAGS"] == f"--xla_cpu_multi_thread_eigen=false {flag}"


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out.startswith("jmp-train 0.")
