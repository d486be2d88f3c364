"""Runs that are stopped and go on: the same parameters and the same report as in one piece."""

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest

import jmp_train as jt
from jmp_train.records import Event, Progress, Run
from jmp_train.resuming import Saving, Stopped
from jmp_train.tasks import load_task
from jmp_train.tasks.task import Task
from jmp_train.training import train


@pytest.fixture(name="task", scope="module")
def fixture_task() -> Task:
    """Returns digits, with dropout and BatchNorm, of five steps an epoch."""
    task = load_task("digits")
    rows = {name: array[:160] for name, array in task.train.items()}
    return dataclasses.replace(task, train=rows, batch_size=32)


# What is not the same in two runs: times, memory, and the time of writing.
_OTHERS = ("seconds", "memory", "METADATA")


def run(
    task: Task, directory: Path, stop: Callable[[], bool] = lambda: False, **options: Any
) -> Run:
    policy, every = options.pop("policy", "mixed_float16"), options.pop("every", None)
    resume = options.pop("resume", True)
    with jt.CheckpointStore(directory) as store, jax.numpy_dtype_promotion("standard"):
        saving = Saving(store, every, resume, stop)
        return train(task, policy, epochs=3, saving=saving, **options)


def final(directory: Path) -> dict[str, bytes]:
    """Returns the files of arrays of the last step, but for times and memory."""
    last = max(path for path in directory.iterdir() if path.name.startswith("step_"))
    return {
        str(path.relative_to(last)): path.read_bytes()
        for path in sorted((last / "arrays").rglob("*"))
        if path.is_file() and not any(x in str(path) for x in _OTHERS)
    }


def without_times(run: Run) -> Run:
    epochs = [dataclasses.replace(epoch, seconds=0.0, memory_mb=0.0) for epoch in run.epochs]
    return dataclasses.replace(run, compile_seconds=0.0, epochs=tuple(epochs))


def test_a_run_that_was_stopped_twice_ends_as_one_in_a_piece(task: Task, tmp_path: Path) -> None:
    whole = run(task, tmp_path / "whole")
    done = 0
    for steps in (3, 10):  # within an epoch, and at the end of one
        # It is asked after each step, and once more when all is saved.
        answers = iter([False] * (steps - done - 1) + [True, True])
        with pytest.raises(Stopped) as stopped:
            run(task, tmp_path / "parts", lambda answers=answers: next(answers))
        done = stopped.value.step
        assert done == steps
    again = run(task, tmp_path / "parts")
    assert without_times(again) == without_times(whole)
    arrays = final(tmp_path / "whole")
    assert len(arrays) > 50
    assert final(tmp_path / "parts") == arrays


@pytest.mark.slow
def test_a_run_that_is_ready_is_tested_again(task: Task, tmp_path: Path) -> None:
    events: list[Event] = []
    first = run(task, tmp_path)
    second = run(task, tmp_path, on_event=events.append)
    assert without_times(second) == without_times(first)
    assert not any(isinstance(event, Progress) for event in events)


def test_what_is_not_the_same_run_is_refused(task: Task, tmp_path: Path) -> None:
    run(task, tmp_path, every=7)
    assert sorted(x.name for x in tmp_path.iterdir()) == [
        "run.json",
        "step_00000007",
        "step_00000014",
        "step_00000015",
    ]
    with pytest.raises(ValueError, match="has checkpoints already: go on with --resume"):
        run(task, tmp_path, resume=False)
    text = "is of another run: policy: the run has mixed_float16, this call float32; seed: the run has 0, this call 4$"
    with pytest.raises(ValueError, match=text):
        run(task, tmp_path, policy="float32", seed=4)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    "number",
    [
        signal.SIGTERM,
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_a_signal_saves_and_the_command_goes_on(number: int, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jmp_train", "train", "digits", "--policy", "mixed_float16"]
    command += ["--epochs", "40", "--checkpoint-dir", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first epoch
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "jmp-train: stopped after step " in errors
    done = int(errors.split("after step ")[1].split(",")[0])
    assert f"step_{done:08d}" in os.listdir(tmp_path)
    assert done < 40 * 22
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert refused.stderr.startswith("jmp-train: error: ")
    assert "has checkpoints already" in refused.stderr
