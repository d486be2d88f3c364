import dataclasses
import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from image_files import write_mnist
from made_runs import make_run

from jmp_train.cli import compare as compare_command
from jmp_train.cli import entry as cli
from jmp_train.cli.entry import main, provide_cpu_devices, turn_ynn_fusion_off
from jmp_train.cli.errors import Failure
from jmp_train.runs.events import Compiled, Epoch, Planned, Run, event_from_json

pytestmark = pytest.mark.quick

COMMAND = (sys.executable, "-m", "jmp_train")


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Without conftest.py's virtual devices, as users have it.
    env = {k: v for k, v in os.environ.items() if k not in ("NPROC", "JAX_NUM_CPU_DEVICES")}
    command = (*COMMAND, *args)
    return subprocess.run(command, capture_output=True, text=True, timeout=240, cwd=cwd, env=env, check=False)


def check_schema(report: Any, policies: list[str], epochs: int, task: str = "digits", device: str = "cpu") -> None:
    assert set(report) == {"task", "runs"}
    assert report["task"] == task
    assert [entry["policy"] for entry in report["runs"]] == policies
    for entry in report["runs"]:
        assert set(entry) == {
            "policy", "device", "metrics", "higher_is_better", "test_accuracy", "compile_seconds", "memory_of",
            "epochs",
            "iterations_per_second", "samples_per_second", "nonfinite_outputs", "costs",
        }  # fmt: skip
        assert 0 < entry["iterations_per_second"] < entry["samples_per_second"]
        assert 0 <= entry["test_accuracy"] <= 1
        assert entry["nonfinite_outputs"] == 0
        assert entry["compile_seconds"] > 0
        costs = entry["costs"]
        assert costs["residual_bytes"] > 0 < costs["params_bytes"] <= costs["opt_state_bytes"]
        assert (costs["half_flops_share"] > 0) == (entry["policy"] != "float32")
        assert (entry["device"], entry["memory_of"]) == (device, "process")
        assert [epoch["epoch"] for epoch in entry["epochs"]] == list(range(1, epochs + 1))
        for epoch in entry["epochs"]:
            assert set(epoch) == {
                "epoch", "loss", "seconds", "memory_mb", "loss_scale", "skipped_steps",
            }  # fmt: skip
            assert epoch["loss"] > 0 < epoch["seconds"] < 100 < epoch["memory_mb"]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_compare_prints_a_line_an_epoch_a_table_and_writes_the_report(tmp_path: Path) -> None:
    policies = ["float32", "apex-O2"]
    result = run("compare", "karate", "--modes", *policies, "--epochs", "2", "--out", "a/b", cwd=tmp_path)
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
    check_schema(json.loads((tmp_path / "a/b/report.json").read_text()), policies, 2, task="karate")
    assert sorted(path.name for path in (tmp_path / "a/b").iterdir()) == [
        "report.html", "report.json", "report.png",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(300)
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
@pytest.mark.timeout(300)
def test_a_report_is_not_lost_to_runs_that_all_fail(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("earlier")
    result = run("compare", "--policies", "float8_e4m3fn", "--out", ".", cwd=tmp_path)
    assert result.returncode == 1
    assert (tmp_path / "report.json").read_text() == "earlier"


@pytest.mark.full
@pytest.mark.timeout(300)
def test_train_json_is_a_line_an_event(tmp_path: Path) -> None:
    result = run(
        "train", "--policy", "mixed_bfloat16", "--epochs", "2", "--json", "--logdir", "log",
        cwd=tmp_path,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    events = [event_from_json(json.loads(line)) for line in result.stdout.splitlines()]
    assert events[0] == Planned(epochs=2, total=44)
    assert isinstance(events[1], Compiled)
    assert [event.epoch for event in events if isinstance(event, Epoch)] == [1, 2]
    final = events[-1]
    assert isinstance(final, Run)
    assert len(final.steps) == 44
    assert final.metrics["test_accuracy"] > 0.5
    logged = (tmp_path / "log/mixed_bfloat16/metrics.jsonl").read_text().splitlines()
    assert json.loads(logged[-1]) == {"test_accuracy": final.metrics["test_accuracy"]}
    assert len(list((tmp_path / "log/mixed_bfloat16").glob("events.out.tfevents.*"))) == 1


@pytest.mark.full
@pytest.mark.timeout(300)
def test_the_last_skipped_steps_are_written_as_capsules(tmp_path: Path) -> None:
    result = run("train", "--mode", "naive", "--epochs", "2", "--json", "--capsules", "made/capsules", cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    final = event_from_json(json.loads(result.stdout.splitlines()[-1]))
    assert isinstance(final, Run)
    skipped = [step.step - 1 for step in final.steps if not step.finite]
    assert len(skipped) > 3
    names = [path.name for path in sorted((tmp_path / "made/capsules").iterdir())]
    assert names == [f"step_{number:08d}.capsule" for number in skipped[-3:]]


@pytest.mark.full
@pytest.mark.timeout(300)
def test_logs_of_two_runs_are_not_mixed(tmp_path: Path) -> None:
    (tmp_path / "log/float32").mkdir(parents=True)
    (tmp_path / "log/float32/metrics.jsonl").write_text("earlier")
    for command in (("train", "--policy", "float32"), ("compare",)):
        result = run(*command, "--logdir", "log", cwd=tmp_path)
        assert (result.returncode, result.stdout) == (2, "")
        assert result.stderr == ("jmp-train: error: --logdir: log/float32 holds the log of another run\n")
    assert (tmp_path / "log/float32/metrics.jsonl").read_text() == "earlier"


@pytest.mark.full
@pytest.mark.timeout(300)
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
    assert re.search(r"float32 [━╺╸ ]+44/44 steps", text)
    assert re.search(r"float32 +compiling", text)
    assert "float32         epoch 2/2  loss" in text
    assert re.search(r"float32 +\d+\.\d\d +\d+\.\d s +\d+\.\d+% .* 1 +0", text)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_mnist_is_compared_from_files(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=64, test=16)
    policies = ["float32", "mixed_float16"]
    result = run(
        "compare", "mnist", "--data-dir", ".", "--policies", *policies, "--epochs", "1",
        "--batch-size", "16", "--train-size", "32", "--out", "out", cwd=tmp_path,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    report = json.loads((tmp_path / "out/report.json").read_text())
    check_schema(report, policies, epochs=1, task="mnist")


@pytest.mark.full
@pytest.mark.timeout(300)
def test_interrupting_compare_stops_the_run(tmp_path: Path) -> None:
    # Processes inherit that SIGINT is ignored, as it is where the tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    command = (*COMMAND, "compare", "--epochs", "100000")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        signal.signal(signal.SIGINT, before)
        try:
            assert process.stdout is not None
            assert "epoch" in process.stdout.readline()
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 130
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "error: a command is needed: train, compare, diagnose, tune, plan or launch; see --help"),
        (["train", "nosuch"], "'nosuch' is not a task: digits, mnist, karate, "),
        (["train", "--policy", "float31"], "argument --policy: Unknown dtype 'float31'"),
        (["compare", "--policies", "float32", "c=x"], "argument --policies: Unknown dtype 'x'"),
        (
            ["train", "--policy", "float16,0.9:float32"],
            "argument --policy: 'float16,0.9:float32': all phases must store parameters in the same dtypes, but ",
        ),
        (
            ["compare", "--modes", "float32", "torch,0.9:apex-O1"],
            "all phases must have the same loss scale, but torch and apex-O1 differ",
        ),
        (
            ["diagnose", "--policy", "a:b"],
            "'a' in 'a:b' is not a fraction of the run; write a schedule as NAME,FRACTION:NAME",
        ),
        (["train", "--policy", "float32,0.9:float31"], "argument --policy: Unknown dtype 'float31'"),
        (
            ["plan", "--policies", "mixed_float16,0.9:float32"],
            (
                "argument --policies: 'mixed_float16,0.9:float32' is a schedule; name its policies one by one: "
                "mixed_float16 float32"
            ),
        ),
        (
            ["train", "--policy", "mixed_float16,0.99:float32", "--epochs", "1"],
            "'mixed_float16,0.99:float32': a run of 22 steps has no step for the phase that starts at 0.99; use more ",
        ),
        (["train", "--mode", "apex-O4"], "argument --mode: Unknown dtype 'apex-O4' must be full"),
        (
            ["compare", "--modes", "torch", "apex-02"],
            (
                "or a policy: mixed_float16, mixed_bfloat16, autocast_float16, autocast_bfloat16, or "
                "'params=...,compute=...'; or an AMP mode: torch, apex-O0, apex-O1, apex-O2, apex-O3, "
                "naive, each also with -bfloat16"
            ),
        ),
        (
            ["train", "--policy", "float32", "--mode", "torch"],
            "argument --mode: not allowed with argument --policy",
        ),
        (
            ["compare", "--modes", "torch", "--policies", "float32"],
            "argument --policies: not allowed with argument --modes",
        ),
        (["train", "--epochs", "0"], "'0' is not a whole number of at least 1"),
        (["train", "--batch-size", "-3"], "argument --batch-size: '-3' is not a whole number"),
        (["train", "--seed", "x"], "'x' is not a whole number from 0 to 4294967295"),
        (["train", "--seed", str(2**32)], "'4294967296' is not a whole number from 0"),
        (["train", "--train-size", "0"], "argument --train-size: '0' is not a whole number of at"),
        (["train", "--devices", "0"], "argument --devices: '0' is not a whole number of at least"),
    ],
)
def test_wrong_calls_are_one_line_and_exit_with_2(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.full
def test_a_batch_too_large_is_found_before_anything_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["compare", "--batch-size", "1438", "--out", str(out)]) == 2
    assert capsys.readouterr().err == (
        "jmp-train: error: batch_size=1438 must be between 1 and the 1437 training examples\n"
    )
    assert not out.exists()


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--train-size", "1438"], "train_size=1438 must be between 1 and the 1437"),
        (["train", "--data-dir", "x"], "unrecognized arguments: --data-dir"),
        (
            ["train", "mnist", "--data-dir", "nowhere"],
            "data_dir nowhere is not a folder; MNIST's are public in",
        ),
        (["compare", "mnist", "--synthetic", "--data-dir", "x"], "exclude each other"),
        (["compare", "--policies", "float32", "float32"], "--policies names float32 more than"),
        (["compare", "--modes", "naive", "naive"], "--modes names naive more than"),
        (["compare", "--devices", "8", "--batch-size", "100"], "devices=8 must divide batch_size"),
        (
            ["train", "planetoid", "--synthetic", "--devices", "2"],
            "devices=2: all batches share arrays, such as a whole",
        ),
    ],
)
def test_errors_of_the_data_are_one_line(args: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(args) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("jmp-train: error: ")
    assert message in error
    assert error.count("\n") == 1


def test_compare_says_why_a_mode_fell_behind_or_failed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def run_in_process(args: Any, name: str, display: Any) -> Run:
        del args, display
        if name == "apex-O3-bfloat16":
            raise Failure("the output is not finite")
        return dataclasses.replace(make_run(name), metrics={"test_accuracy": 0.9 if "-O" in name else 0.95})

    monkeypatch.setattr(compare_command, "_run_in_process", run_in_process)
    modes = ("float32", "apex-O2", "apex-O3", "apex-O3-bfloat16")
    assert main(["compare", "karate", "--out", str(tmp_path), "--modes", *modes]) == 1
    out, error = capsys.readouterr()
    behind = [line for line in out.splitlines() if "below float32" in line]
    assert len(behind) == 1
    assert behind[0].startswith("apex-O3 is 5.00 points of test accuracy below float32. apex-O3 has")
    reason = "apex-O3-bfloat16: the output is not finite. apex-O3-bfloat16 has no float32"
    assert error.startswith(f"jmp-train: error: {reason}")
    page = (tmp_path / "report.html").read_text()
    assert f"<p>{behind[0]}</p>" in page
    assert "did not end: the output is not finite. apex-O3-bfloat16 has no float32" in page


def test_missing_files_of_mnist_are_a_line_each(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["compare", "mnist", "--data-dir", str(tmp_path)]) == 2
    first, *lines = capsys.readouterr().err.splitlines()
    assert first.startswith(f"jmp-train: error: data_dir {tmp_path} lacks files; MNIST's are public")
    assert len(lines) == 4
    assert all("https://" in line and "bytes, sha256 " in line for line in lines)


def test_an_output_folder_that_cannot_be_made_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    assert main(["compare", "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"jmp-train: error: --out {out}: Not a directory\n"


def test_a_missing_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert main(["train"]) == 1
    assert "this needs the package sklearn.datasets: pip install 'jmp_train[train]'" in (capsys.readouterr().err)


def test_the_reason_of_a_died_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert compare_command._reason(-9, "") == "killed by signal 9"
    assert compare_command._reason(1, "Traceback\nboom\n") == "ended with exit code 1"
    assert "boom" in capsys.readouterr().err
    assert compare_command._reason(1, "warning\njmp-train: error: why\n") == "why"
    assert compare_command._reason(2, "jmp-train: error: no:\n  a\n  b\n") == "no:\n  a\n  b"


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
    assert capsys.readouterr().out.startswith("jmp-train 0.")


@pytest.mark.full
def test_who_names_no_policy_trains_under_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    with jax.numpy_dtype_promotion("standard"):  # as in a user's process
        assert main(["train", "karate", "--epochs", "1", "--json"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert json.loads(lines[-1])["policy"] == "autocast_float16"
    assert cli.DEFAULT_POLICIES == ("float32", "autocast_float16", "autocast_bfloat16")
