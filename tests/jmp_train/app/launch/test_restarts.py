"""Processes that are killed at any moment: all restart, and nothing of the run is lost."""

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

EXAMPLE = Path(__file__).resolve().parents[4] / "examples" / "data_parallel" / "checkpoint.py"
RUN = ("--steps", 1000)  # longer than it takes to be killed often, on a fast machine too


def launch(directory: Path, *options: object, count: int = 2) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "jmp_train", "launch", "-n", str(count), "--restarts", "40"]
    command += ["--", str(EXAMPLE), "--directory", str(directory), *map(str, options)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def result(text: str) -> str:
    """Returns the last line of process 0: the number of steps, and the parameters' fingerprint."""
    found = re.search(r"^\[0\] (step \d+: parameters \w{16})$", text, re.MULTILINE)
    assert found, text
    return found[1]


@pytest.fixture(name="undisturbed", scope="module")
def fixture_undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with launch(tmp_path_factory.mktemp("undisturbed"), *RUN) as process:
        text, _ = process.communicate(timeout=200)
    assert process.returncode == 0, text
    yield result(text)


@pytest.mark.timeout(900)
def test_a_run_whose_processes_are_killed_ends_as_one_that_is_left_alone(undisturbed: str, tmp_path: Path) -> None:
    kills = 20
    generator, lines, killed = random.Random(0), [], []
    with launch(tmp_path / "run", *RUN, "--every", 20) as launcher:
        assert launcher.stdout is not None
        pids: dict[str, int] = {}
        timer = None
        for line in launcher.stdout:
            lines.append(line)
            found = re.match(r"\[(\d)\] process \d \((\d+)\) goes on from step (\d+)", line)
            if not found:
                continue
            pids[found[1]] = int(found[2])
            if len(pids) == 2 and len(killed) < kills:
                victim = pids[generator.choice("01")]
                killed.append(victim)
                # While it compiles, trains or saves.
                timer = threading.Timer(generator.uniform(0, 3), kill, [victim])
                timer.start()
                pids = {}
        assert launcher.wait() == 0, "".join(lines)
        if timer is not None:
            timer.join()
    text = "".join(lines)
    starts = [int(step) for step in re.findall(r"\[0\] process 0 .* goes on from step (\d+)", text)]
    assert result(text) == undisturbed, text
    # On a loaded machine many are killed at their end, when the other one has ended.
    assert text.count("restarting all") >= kills // 4, text
    assert starts == sorted(starts)
    saved = 0
    for line in lines:  # each start knows of all that was saved but, at most, the step being written
        if number := re.match(r"\[0\] step (\d+)  loss", line):
            saved = int(number[1])
        if number := re.match(r"\[0\] process 0 .* goes on from step (\d+)", line):
            assert int(number[1]) >= saved - 20, text


def kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        time.sleep(0)  # it was ready before


@pytest.mark.timeout(200)
def test_two_processes_checkpoint_goes_on_in_one(tmp_path: Path) -> None:
    for count, steps, start in ((2, 40, 0), (1, 60, 40)):
        with launch(tmp_path, "--steps", steps, count=count) as process:
            text, _ = process.communicate(timeout=150)
        assert process.returncode == 0, text
        for rank in range(count):
            assert re.search(rf"^\[{rank}\] process {rank} .* from step {start}$", text, re.MULTILINE), text
        assert f"step {steps}: parameters" in text
