"""`jmp-train compare` and `train` as real processes: full disks, lost output, signals, hostile modules."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest
from example_tasks import FOLDER
from process_helpers import shell

from jmp_train.app.cli import compare as compare_command
from jmp_train.app.cli.compare import CompareOptions, call_as_text
from jmp_train.app.cli.jobs import Call
from jmp_train.app.runs.events import Failed
from jmp_train.app.tasks import find_task
from jmp_train.checkpoints.store import CheckpointStore

HOSTILE = "import pathlib, sys; pathlib.Path(__file__).with_name('RAN').touch(); sys.exit('hostile')"

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(300),
    pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's"),
]


def test_nothing_of_the_current_folder_runs_and_pythonpath_is_heeded(tmp_path: Path) -> None:
    hostile, chosen = tmp_path / "hostile", tmp_path / "chosen"
    for folder in (hostile / "jmp_train", chosen):
        folder.mkdir(parents=True)
    for name in ("networkx", "rich", "jax", "json", "sitecustomize", "jmp_train/__init__"):
        (hostile / f"{name}.py").write_text(HOSTILE)
    # What a library might print on the output of the process: a line, and half of one before the first event.
    (chosen / "sitecustomize.py").write_text("print('hello'); print('half', end='')")
    path = f"{chosen}:{FOLDER}:{FOLDER.parents[1]}"
    code, out, error = shell(
        "$PYTHON -P -m jmp_train compare karate:task --epochs 1 --policies float32 --json", hostile, PYTHONPATH=path
    )
    assert not list(hostile.rglob("RAN"))
    assert code == 0
    assert len(error.splitlines()) == 1  # of the epoch
    assert json.loads(out.removeprefix("hello\nhalf"))["runs"][0]["policy"] == "float32"


def test_a_schedule_is_compared_as_a_policy_is(tmp_path: Path) -> None:
    code, out, error = shell(
        "$PYTHON -m jmp_train compare karate:task --policies float32 'mixed_float16, .60:float32' --out out "
        "--logdir log",
        tmp_path,
    )
    assert (code, error) == (0, "")
    name = "mixed_float16,0.6:float32"
    said = f"{name}: mixed_float16 in steps 1 to 30 (75.3% of the flops in half precision), float32 in steps 31 to 50"
    assert f"{name} from step 31 to 50 in float32\n" in out
    assert said in out
    float32, schedule = json.loads((tmp_path / "out/report.json").read_text())["runs"]
    assert schedule["policy"] == name
    assert [(phase["policy"], phase["stop"]) for phase in schedule["phases"]] == [
        ("mixed_float16", 30),
        ("float32", 50),
    ]
    share = schedule["costs"]["half_flops_share"]
    assert share == pytest.approx(0.6 * schedule["phases"][0]["costs"]["half_flops_share"])
    assert schedule["costs"]["residual_bytes"] == float32["costs"]["residual_bytes"]  # the most of the two
    assert abs(schedule["epochs"][-1]["loss"] - float32["epochs"][-1]["loss"]) < 0.02
    assert said in (tmp_path / "out/report.html").read_text()
    assert '{"phase": "float32", "start": 30, "stop": 50}' in (tmp_path / f"log/{name}/metrics.jsonl").read_text()


def test_python_m_leaves_the_current_folder_before_it_imports_anything(tmp_path: Path) -> None:
    for name in ("networkx", "jax", "flax", "numpy", "typing_extensions", "random", "logging"):
        (tmp_path / f"{name}.py").write_text(HOSTILE)
    code, out, error = shell("PYTHONIOENCODING=ascii $PYTHON -m jmp_train train karate:task --epochs 1", tmp_path)
    assert (code, error) == (0, "")
    assert not (tmp_path / "RAN").exists()
    assert "epoch 1/1" in out
    assert out.isascii()


def test_the_processes_run_this_very_package(tmp_path: Path) -> None:
    other = tmp_path / "jmp_train"
    other.mkdir()
    (other / "__init__.py").write_text(HOSTILE)
    call = Call("nowhere.py", find_task("digits"), CompareOptions(), {})
    command = f"{shlex.join(compare_command._command())} '{call_as_text(call, 'float32')}'"
    code, out, _ = shell(command, tmp_path, PYTHONPATH=str(tmp_path))
    sent = out.strip().removeprefix(compare_command._SENT.decode())
    assert (code, compare_command._from_text(sent)) == (1, Failed("nowhere.py is not a file", is_wrong_call=True))


def test_a_full_disk_costs_what_does_not_fit_and_is_named(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/report.json").write_text("earlier")
    code, out, error = shell(
        "ulimit -f 21; $PYTHON -m jmp_train compare karate:task --policies float32 --out out --logdir log --epochs 100",
        tmp_path,
    )
    assert code == 1
    lines = [line for line in out.splitlines() if " epoch " not in line]
    assert sum(line.split()[:1] == ["float32"] for line in lines) == 2  # a row of the results, one of the costs
    assert lines[-3].startswith("peak memory of the process")
    assert lines[-2:] == ["wrote out/report.svg", "wrote out/report.html"]  # report.json has 23 kB, report.html 19
    warning = "jmp-train: warning: float32: --logdir log/float32: File too large"
    assert error.splitlines() == [
        f"{warning}; the log lacks some of the run",
        "jmp-train: error: out/report.json: File too large",
    ]
    assert (tmp_path / "out/report.json").read_text() == "earlier"
    assert len(list((tmp_path / "out").iterdir())) == 3


@pytest.mark.parametrize(
    ("command", "code", "warnings"),
    [
        ("train karate:task --epochs 2 --checkpoint-dir run >/dev/full", 0, 1),
        ("train karate:task --epochs 2 --checkpoint-dir run --json >/dev/full", 1, 1),
        ("train karate:task --epochs 2 --checkpoint-dir run | head -1", 0, 0),
        ("compare karate:task --epochs 1 --policies float32 --out out >&-", 0, 1),
        ("compare karate:task --epochs 1 --policies float32 --out out --json >/dev/full", 1, 1),
    ],
)
def test_a_run_outlives_its_output(tmp_path: Path, command: str, code: int, warnings: int) -> None:
    ended, _, error = shell(f"$PYTHON -m jmp_train {command}", tmp_path)
    lines = [line for line in error.splitlines() if " epoch " not in line and "wrote" not in line]
    assert (ended, len(lines)) == (code, warnings), error
    assert all(line.startswith("jmp-train: warning: standard output: ") for line in lines)
    if command.startswith("train"):
        assert CheckpointStore(tmp_path / "run").steps()[-1] == 2
    else:
        assert len(list((tmp_path / "out").iterdir())) == 3


def marked(mark: str) -> dict[int, str]:
    """Returns the command lines of all processes that have `mark` in their environment."""
    found = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().decode()
            except OSError:  # it has ended
                continue
    return {number: command for number, command in found.items() if command}  # else it is dead


def wait_until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGTERM], 143),
        ([signal.SIGHUP], 129),
        ([signal.SIGKILL], -9),
        ([signal.SIGINT], 130),
        ([signal.SIGINT, signal.SIGINT], 130),
    ],
)
def test_compare_leaves_no_process_behind(tmp_path: Path, signals: list[signal.Signals], code: int) -> None:
    mark = f"MARK={uuid.uuid4().hex}"
    # Processes inherit that SIGINT is ignored, as it is where the tests run in the background.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    process = subprocess.Popen(
        [sys.executable, "-m", "jmp_train", "compare", "karate:task", "--epochs", "100000"],
        cwd=tmp_path,
        env={**os.environ, "MARK": mark.removeprefix("MARK=")},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    signal.signal(signal.SIGINT, before)
    try:
        wait_until(lambda: sum("run_child" in text for text in marked(mark).values()) == 2)
        for number in signals:
            process.send_signal(number)
        _, error = process.communicate(timeout=60)
        assert (process.returncode, error) == (code, "")
        wait_until(lambda: not marked(mark), 30)
    finally:
        for number in marked(mark):
            os.kill(number, signal.SIGKILL)
