import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from made_runs import make_run
from process_helpers import jmp_train_command as run

import jmp_train as jt
from jmp_train.app.cli import compare as compare_command
from jmp_train.app.cli.compare import RunFailure
from jmp_train.app.cli.entry import main
from jmp_train.app.cli.jobs import provide_cpu_devices, turn_ynn_fusion_off
from jmp_train.app.runs.events import Failed, Run

pytestmark = [pytest.mark.quick, pytest.mark.timeout(300)]

COMMAND = (sys.executable, "-m", "jmp_train")


def check_schema(report: Any, policies: list[str], epochs: int, task: str = "digits", device: str = "cpu") -> None:
    assert set(report) == {"task", "runs"}
    assert report["task"] == task
    assert [entry["policy"] for entry in report["runs"]] == policies
    for entry in report["runs"]:
        assert set(entry) == {
            "policy", "device", "metrics", "higher_is_better", "compile_seconds", "memory_of", "epochs",
            "batch_size", "iterations_per_second", "samples_per_second", "costs",
        }  # fmt: skip
        assert 0 < entry["iterations_per_second"] < entry["samples_per_second"]
        assert 0 <= entry["metrics"]["test_accuracy"] <= 1
        assert entry["metrics"]["nonfinite_outputs"] == 0
        assert entry["compile_seconds"] > 0
        costs = entry["costs"]
        assert costs["residual_bytes"] > 0 < costs["params_bytes"] <= costs["opt_state_bytes"]
        assert (costs["half_flops_share"] > 0) == (entry["policy"] != "float32")
        assert (entry["device"], entry["memory_of"]) == (device, "process")
        assert [epoch["epoch"] for epoch in entry["epochs"]] == list(range(1, epochs + 1))
        for epoch in entry["epochs"]:
            assert set(epoch) == {
                "epoch", "loss", "learning_rate", "seconds", "memory_mb", "loss_scale", "skipped_steps",
            }  # fmt: skip
            assert epoch["loss"] > 0 < epoch["seconds"] < 100 < epoch["memory_mb"]


@pytest.mark.full
def test_compare_prints_a_line_an_epoch_a_table_and_writes_the_report(tmp_path: Path) -> None:
    policies = ["float32", "apex-O2"]
    result = run("compare", "karate:task", "--modes", *policies, "--epochs", "2", "--out", "a/b", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert [line.split("  ")[0].split()[0] for line in lines[:4]] == [p for p in policies for _ in "12"]
    for line in lines[:4]:
        for part in ("epoch", "loss", "learning rate", " s ", "loss scale", "skipped steps"):
            assert part in line
        assert "memory" not in line  # the process' says little
    assert any("test accuracy" in line and "memory" not in line for line in lines[5:])
    assert any("flops in half" in line and "saved" in line for line in lines[5:])
    assert re.search(r"apex-O2 +\d\d\.\d% +[\d.]+ kB +0\.\d\dx +[\d.]+ kB +[\d.]+ kB +1\.\d\dx", result.stdout)
    assert re.search(r"peak memory of the process.*: float32 \d+ MB,\s+apex-O2 \d+ MB", result.stdout)
    assert re.search(r"apex-O2 +[\d.]+ +[\d.]+ +[\d.]+( \([\d.]+ to [\d.]+\))? +\d+\.\d\dx *\n", result.stdout)
    check_schema(json.loads((tmp_path / "a/b/report.json").read_text()), policies, 2, task="karate:task")
    assert sorted(os.listdir(tmp_path / "a/b")) == ["report.html", "report.json", "report.svg"]


@pytest.mark.full
def test_compare_json_on_eight_devices_and_a_run_that_fails(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("earlier")
    result = run(
        "compare", "--policies", "float8_e4m3fn", "bf16", "--epochs", "1", "--json", "--out", ".",
        "--devices", "8", cwd=tmp_path,
    )  # fmt: skip
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith(
        "jmp-train: error: float8_e4m3fn: Input dtypes ('float8_e4m3fn', 'float32')"
    )
    check_schema(json.loads(result.stdout), ["bf16"], epochs=1, device="8 x cpu")
    assert json.loads((tmp_path / "report.json").read_text()) == json.loads(result.stdout)


@pytest.mark.full
def test_reports_and_logs_of_earlier_runs_are_kept(tmp_path: Path) -> None:
    report, log = tmp_path / "report.json", tmp_path / "log/float32/metrics.jsonl"
    log.parent.mkdir(parents=True)
    report.write_text("earlier")
    log.write_text("earlier")
    assert run("compare", "--policies", "float8_e4m3fn", "--out", ".", cwd=tmp_path).returncode == 1
    for command in (("train", "--policy", "float32"), ("compare",)):
        result = run(*command, "--logdir", "log", cwd=tmp_path)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == "jmp-train: error: --logdir: log/float32 holds the log of another run\n"
    assert report.read_text() == log.read_text() == "earlier"


@pytest.mark.full
def test_train_json_is_a_line_an_event(tmp_path: Path) -> None:
    result = run(
        "train", "--policy", "mixed_bfloat16", "--epochs", "2", "--json", "--logdir", "log",
        cwd=tmp_path,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    events = [json.loads(line) for line in result.stdout.splitlines()]
    assert events[0] == {"event": "planned", "epochs": 2, "total": 44}
    assert [events[1]["event"], events[-1]["event"]] == ["compiled", "run"]
    assert [event["epoch"] for event in events if event["event"] == "epoch"] == [1, 2]
    final = events[-1]
    assert len(final["steps"]) == 44
    assert final["metrics"]["test_accuracy"] > 0.5
    logged = (tmp_path / "log/mixed_bfloat16/metrics.jsonl").read_text().splitlines()
    assert json.loads(logged[-1]) == {"test_accuracy": final["metrics"]["test_accuracy"]}
    assert len(list((tmp_path / "log/mixed_bfloat16").glob("events.out.tfevents.*"))) == 1


@pytest.mark.full
def test_the_last_skipped_steps_are_written_as_capsules(tmp_path: Path) -> None:
    result = run("train", "--mode", "naive", "--epochs", "2", "--json", "--capsules", "made/capsules", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    final = json.loads(result.stdout.splitlines()[-1])
    skipped = [step["step"] - 1 for step in final["steps"] if not step["finite"]]
    assert len(skipped) > 3
    assert sorted(os.listdir(tmp_path / "made/capsules")) == [f"step_{number:08d}.capsule" for number in skipped[-3:]]


@pytest.mark.full
def test_a_terminal_gets_bars_and_the_table(tmp_path: Path) -> None:
    terminal, side_of_the_process = pty.openpty()
    process = subprocess.Popen(
        (*COMMAND, "compare", "--policies", "float32", "--epochs", "2"),
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "100", "LINES": "40", "TERM": "xterm-256color"},
        stdin=side_of_the_process,
        stdout=side_of_the_process,
        stderr=side_of_the_process,
    )
    os.close(side_of_the_process)
    chunks = []
    try:
        while chunk := os.read(terminal, 65536):
            chunks.append(chunk)
    except OSError:  # what Linux says when the other side is closed
        pass
    os.close(terminal)
    assert process.wait(60) == 0
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", b"".join(chunks).decode())
    assert re.search(r"float32 [━╺╸ ]+44/44", text)
    assert re.search(r"float32 .* compiling", text)
    assert "float32         epoch 2/2  loss" in text
    assert re.search(r"float32 +\d+\.\d\d +\d+\.\d s +\d+\.\d+% .* 1 +0", text)


def test_a_comparison_of_which_one_run_fails_has_the_others_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run_in_process(call: Any, name: str, display: Any) -> Run:
        if name == "apex-O3":
            raise RunFailure(Failed("the output is not finite"), has_begun=True)
        return make_run(name)

    monkeypatch.setattr(compare_command, "_run_in_process", run_in_process)
    assert main(["compare", "karate:task", "--out", str(tmp_path), "--modes", "float32", "apex-O3"]) == 1
    assert capsys.readouterr().err == "jmp-train: error: apex-O3: the output is not finite\n"
    assert "apex-O3 did not end: the output is not finite" in (tmp_path / "report.html").read_text()


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["train"]) == 1
    assert "this needs the package sklearn.datasets: pip install 'jmp_train[train]'" in (capsys.readouterr().err)


@pytest.mark.parametrize(
    ("program", "reason", "error"),
    [
        ("import os; print('boom', flush=True); os.kill(os.getpid(), 9)", "killed by signal 9", ""),
        ("import sys; sys.exit('boom')", "ended with exit code 1", "boom\n"),
        ("print(7)", "ended without a result", ""),
    ],
)
def test_the_reason_of_a_died_process(
    program: str, reason: str, error: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(compare_command, "_command", lambda: [sys.executable, "-S", "-c", program])
    assert main(["compare", "digits", "--policies", "float32"]) == 1
    assert capsys.readouterr() == ("", f"{error}jmp-train: error: {reason}\n")


def test_the_environment_of_a_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    flag = "--xla_cpu_experimental_ynn_fusion_type="
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    turn_ynn_fusion_off()
    turn_ynn_fusion_off()
    assert os.environ["XLA_FLAGS"] == f"--xla_cpu_multi_thread_eigen=false {flag}"
    monkeypatch.setenv("NPROC", "40")
    provide_cpu_devices(4)
    assert os.environ["NPROC"] == "40"
    assert jax.local_device_count() == 8  # as conftest.py has it


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"jmp-train {jt.__version__}\n"


@pytest.mark.full
def test_who_names_no_policy_trains_under_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    with jax.numpy_dtype_promotion("standard"):  # as in a user's process
        assert main(["train", "karate:task", "--epochs", "1", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["policy"] == "autocast_float16"
    assert compare_command.DEFAULT_POLICIES == ("float32", "autocast_float16", "autocast_bfloat16")
