"""Signals that ask a run to stop: in one process, and in several by real signals to `jmp-train launch`."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from killed_runs import campaign, descendants
from process_helpers import launched, survivors

import jmp_train as jt
from jmp_train.distributed.processes import LAUNCHED

pytestmark = [pytest.mark.quick, pytest.mark.timeout(200)]


@pytest.mark.parametrize(
    ("names", "code"), [(["SIGTERM"], 143), (["SIGINT"], 130), (["SIGHUP"], 129), (["SIGHUP", "SIGHUP"], 129)]
)
def test_a_signal_is_noted(names: list[str], code: int) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)]
    with jt.distributed.StopSignals() as stop:
        assert not stop.agreed()
        for name in names:
            signal.raise_signal(getattr(signal, name))
        assert stop.agreed()
        assert stop.finish() == code
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)] == before


@pytest.mark.parametrize("allowed", [1, 2])
@pytest.mark.parametrize("last", ["SIGTERM", "SIGINT"])
def test_one_signal_more_interrupts(allowed: int, last: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHED, raising=False)
    if allowed == 2:  # the launcher passes on what a batch system has also sent to its processes
        monkeypatch.setenv(LAUNCHED, "1")
    with jt.distributed.StopSignals() as stop:
        for _ in range(allowed):
            signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(getattr(signal, last))
        assert stop.agreed()


def test_what_is_ignored_stays_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with jt.distributed.StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.agreed()
    finally:
        signal.signal(signal.SIGHUP, previous)


# By the launcher, whose process 0 prints JSON.
TRAIN = ["-m", "jmp_train", "train", "digits", "--train-size", "64", "--policy", "float32", "--devices", "2", "--json"]


def launch_command(*arguments: object, options: Sequence[str] = ()) -> list[str]:
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", "2", "--grace", "100", *options, "--"]
    return [*command, *TRAIN, *map(str, arguments)]


def stopped(command: list[str], name: str, targets: list[str]) -> tuple[int, str]:
    """Returns exit code and output of a run that gets signals after its second epoch."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines, everyone = [], set[int]()
        for line in process.stdout:
            lines.append(line)
            if '"epoch": 2' in line:
                everyone = descendants(process.pid)
                ranks = dict(sorted(filter(None, map(rank_of, everyone))))
                for target in targets:
                    os.kill(process.pid if target == "launcher" else ranks[target], getattr(signal, name))
        code = process.wait()
    assert survivors({str(pid): pid for pid in everyone}, 20) == []
    return code, "".join(lines)


def rank_of(pid: int) -> tuple[str, int] | None:
    """Returns the rank of a process of the launcher, and its id; None for others, such as supervisors."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return (words[3], pid) if words[1:2] and words[1].endswith("rank.py") else None


def records(text: str) -> tuple[list[tuple[int, float]], str]:
    """Returns the numbers and losses of the epochs of a run that ended, and its metrics."""
    events = [json.loads(line[4:]) for line in text.splitlines() if line.startswith('[0] {"event": "epoch"')]
    # The last event is longer than the launcher's lines.
    return [(event["epoch"], event["loss"]) for event in events], re.findall(r'"metrics": \{.+?\}', text)[0]


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "targets", "code"),
    [
        ("SIGTERM", ["1"], 143),
        ("SIGTERM", ["0", "1"], 143),
        ("SIGTERM", ["launcher"], 143),
        ("SIGTERM", ["launcher", "1", "0"], 143),
        ("SIGINT", ["launcher"], 130),
        ("SIGINT", ["0", "1"], 130),
        ("SIGHUP", ["0", "1"], 129),
    ],
)
def test_all_processes_save_and_end_and_the_resumed_run_is_the_unbroken_one(
    name: str, targets: list[str], code: int, tmp_path: Path
) -> None:
    arguments = ["--epochs", 300, "--checkpoint-every", 10**6, "--checkpoint-dir"]
    returned, text = stopped(launch_command(*arguments, tmp_path / "run"), name, targets)
    assert returned == code, text
    saved = re.findall(r"\[0\] jmp-train: stopped after step (\d+), which is saved; continue with --resume", text)
    assert len(saved) == 1, text
    assert jt.CheckpointStore(tmp_path / "run", read_only=True).steps() == [int(saved[0])]
    assert "Traceback" not in text
    if targets != ["1"]:
        return
    resumed, whole = launch_command(*arguments, tmp_path / "run", "--resume"), launch_command("--epochs", 300)
    texts = [subprocess.check_output(command, text=True, timeout=300) for command in (resumed, whole)]
    (rest, metrics), (everything, wanted) = map(records, texts)
    assert len(everything) == 300
    assert 0 < len(rest) < 300
    assert (rest, metrics) == (everything[-len(rest) :], wanted)


@pytest.mark.full
def test_a_run_that_saves_nothing_ends_at_once() -> None:
    code, text = stopped(launch_command("--epochs", 10**6), "SIGTERM", ["1"])
    assert code == 128 + 15
    assert "jmp-train: error: process 1 was killed by signal 15" in text


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments", [["train", "nosuch"], ["train", "digits", "--epochs", "many"], ["tune", "digits"]]
)
def test_a_refusal_is_one_line(arguments: list[str]) -> None:
    code, text = launched("-m", "jmp_train", *arguments)
    assert code == 2
    assert len(text.splitlines()) == 1, text
    assert text.startswith("jmp-train: error: ")


@pytest.mark.full
def test_a_process_that_refuses_does_not_wait_for_the_others(tmp_path: Path) -> None:
    # Without the launcher, and with time-outs of five minutes.
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{server.getsockname()[1]}"
    variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_NUM_CPU_DEVICES": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, *TRAIN, "--checkpoint-dir", tmp_path, *(["--epochs", "0"] if rank else [])],
            env={**os.environ, **variables, "JAX_PROCESS_ID": str(rank)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        _, error = processes[1].communicate(timeout=150)
        assert processes[1].returncode == 2, error
        assert error.splitlines()[-1].startswith("jmp-train: error: argument --epochs: ")
        processes[0].communicate(timeout=150)
        assert processes[0].returncode != 0
    finally:
        for process in processes:
            process.kill()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(5))
def test_runs_that_are_killed_at_any_moment_end_as_unbroken_ones(part: int) -> None:
    seed = int(os.environ.get("JMP_TRAIN_SEED", "0")) + part
    assert len(campaign(4, seed)) == 4
