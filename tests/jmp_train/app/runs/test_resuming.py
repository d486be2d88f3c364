"""Runs that are stopped and go on: the same parameters and the same report as in one piece.

What a run's checkpoints say of it: every option that its results depend on, and the data.
"""

import dataclasses
import math
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from example_tasks import load_task
from made_runs import first_examples
from sealed_files import entry

import jmp_train as jt
from jmp_train.app.cli.entry import main
from jmp_train.app.runs import RunSettings
from jmp_train.app.runs.events import Epoch, Event, Phase, Progress, Run, StepRecord
from jmp_train.app.runs.loop import train
from jmp_train.app.runs.resuming import ResumeError, Saver, Saving, Stopped, data_digest, differences, run_metadata
from jmp_train.app.runs.run_settings import FewBits, RulesFile, RunLength
from jmp_train.app.runs.task_batches import DataPosition
from jmp_train.policies import TORCH_CUDA, AutocastRules
from jmp_train.task import Arrays, Task

pytestmark = pytest.mark.quick


@pytest.fixture(name="task", scope="module")
def fixture_task() -> Task:
    """Returns digits, with dropout and BatchNorm, of five steps an epoch."""
    task = load_task("digits")
    examples = {name: array[:160] for name, array in task.train.items()}
    return dataclasses.replace(task, train=examples, batch_size=32)


# What is not the same in two runs.
_OTHERS = ("seconds", "memory")


def run(task: Task, directory: Path, stop: Callable[[], bool] = lambda: False, **options: Any) -> Run:
    policy, every = options.pop("policy", "mixed_float16"), options.pop("every", None)
    resume, seed = options.pop("resume", True), options.pop("seed", 0)
    with jt.CheckpointStore(directory) as store, jax.numpy_dtype_promotion("standard"):
        saving = Saving(store, every, resume, stop)
        return train(task, policy, RunSettings(epochs=3, seed=seed), saving=saving, **options)


def final(directory: Path) -> dict[str, str]:
    """Returns the sums of the arrays of the last step, but for times and memory."""
    sums = entry(max(directory.glob("step_*")), "sha256_of_arrays")
    return {path: digest for path, digest in sums.items() if not any(x in path for x in _OTHERS)}


def without_times(run: Run) -> Run:
    epochs = [dataclasses.replace(epoch, seconds=0.0, memory_mb=0.0) for epoch in run.epochs]
    return dataclasses.replace(run, compile_seconds=0.0, epochs=tuple(epochs))


SWITCH = 8  # of 15 steps, with a share of 0.5
TRAIN_DIGITS = (sys.executable, "-m", "jmp_train", "train", "digits")


def run_to(task: Task, directory: Path, policy: str, stops: tuple[int, ...]) -> None:
    """Runs the task in one folder up to each of these steps."""
    done = 0
    for steps in stops:
        answers = iter([False] * (steps - done - 1) + [True])  # asked once after each step
        with pytest.raises(Stopped) as stopped:
            run(task, directory, lambda answers=answers: next(answers), policy=policy)
        done = stopped.value.step
        assert done == steps


@pytest.mark.full
@pytest.mark.parametrize(
    "policy", ["mixed_float16", "mixed_float16,0.5:float32", "torch-bfloat16,0.5:autocast_float16"]
)
def test_a_run_that_was_stopped_ends_as_one_in_a_piece(policy: str, task: Task, tmp_path: Path) -> None:
    whole = run(task, tmp_path / "whole", policy=policy)
    run_to(task, tmp_path / "parts", policy, (3, SWITCH, 10))  # within an epoch, at the switch, at an epoch's end
    events: list[Event] = []
    again = run(task, tmp_path / "parts", policy=policy, on_event=events.append)
    assert without_times(again) == without_times(whole)
    arrays = final(tmp_path / "whole")
    assert len(arrays) > 50
    assert final(tmp_path / "parts") == arrays
    phases = [(phase.start, phase.stop) for phase in again.phases]
    assert phases == ([(0, SWITCH), (SWITCH, 15)] if "," in policy else [])
    assert [event for event in events if isinstance(event, Phase)] == list(again.phases[1:])  # it went on in the last


@pytest.mark.full
def test_a_run_that_is_ready_is_tested_again(task: Task, tmp_path: Path) -> None:
    events: list[Event] = []
    first = run(task, tmp_path)
    second = run(task, tmp_path, on_event=events.append)
    assert without_times(second) == without_times(first)
    assert not any(isinstance(event, Progress) for event in events)


@pytest.mark.full
def test_what_is_not_the_same_run_is_refused(task: Task, tmp_path: Path) -> None:
    run(task, tmp_path, every=7)
    assert sorted(os.listdir(tmp_path)) == ["run.json", *(f"step_{step:08d}.safetensors" for step in (7, 14, 15))]
    with pytest.raises(ValueError, match="already has checkpoints; continue with --resume, or choose another folder"):
        run(task, tmp_path, resume=False)
    (tmp_path / "run.json").unlink()  # every checkpoint says it
    text = (
        f"^{tmp_path} is of another run:\n  policy: the run has mixed_float16, this call float32"
        "\n  seed: the run has 0, this call 4$"
    )
    with pytest.raises(ResumeError, match=text):
        run(task, tmp_path, policy="float32", seed=4)
    assert not (tmp_path / "run.json").exists()


@pytest.mark.full
@pytest.mark.timeout(150)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_the_command_goes_on(number: int, tmp_path: Path) -> None:
    command = [*TRAIN_DIGITS, "--policy", "mixed_float16", "--epochs", "40", "--checkpoint-dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()  # the first epoch
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "jmp-train: stopped after step " in errors
    done = int(errors.split("after step ")[1].split(",")[0])
    assert f"step_{done:08d}.safetensors" in os.listdir(tmp_path)
    assert done < 40 * 22
    refused = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 2
    assert refused.stderr.startswith("jmp-train: error: ")
    assert "already has checkpoints; continue with --resume, or choose another folder" in refused.stderr


STEPS_PER_EPOCH = 4


def small_state(step: int) -> jt.TrainState:
    return jt.TrainState.create({"w": jnp.full(3, float(step))}, optax.sgd(0.1))


def begin(directory: Path, total: int = 100, **options: Any) -> Any:
    """Returns what a run of a small state begins with, and how its next step is saved."""
    store = jt.CheckpointStore(directory)
    saver = Saver(Saving(store, resume=True), RunLength(total // STEPS_PER_EPOCH, total, STEPS_PER_EPOCH))
    metadata = {"run": {"task": "small", "epochs": 3, **options}, "versions": {}}
    saved = saver.begin(small_state(0), metadata)
    saver.write_run_file()
    return saver, store, saved


def save_steps(directory: Path, *steps: int, total: int = 100) -> tuple[list[StepRecord], list[Epoch]]:
    saver, store, _ = begin(directory, total)
    with store:
        records = [StepRecord(n, n / 7, math.nan, 2.0**n, n % 3 > 0) for n in range(1, max(steps) + 1)]
        epochs = [Epoch(n, n / 3, 0.1, 0.2, 0.3, 0.4, n) for n in range(1, len(records) // 4 + 1)]
        for n in steps:
            place = DataPosition(*divmod(n, STEPS_PER_EPOCH))
            saver.save(small_state(n), records[:n], epochs[: place.epoch], place, is_last=False)
    return records, epochs


def test_of_a_million_epochs_what_exists_is_saved(tmp_path: Path) -> None:
    records, epochs = save_steps(tmp_path, 3, 9, total=10**12)
    manifest = entry(tmp_path / "step_00000009.safetensors", "jmp_train.checkpoint")
    assert {leaf["shape"][0] for leaf in manifest["leaves"] if "['steps']" in leaf["path"]} == {9}
    _, store, (done, state, found_steps, found_epochs, place, _) = begin(tmp_path, 10**12)
    assert (done, state.params["w"].tolist()) == (9, [9.0] * 3)
    assert repr(found_steps) == repr(records)  # nan is not equal to itself
    assert found_epochs == epochs
    assert place == DataPosition(2, 1)
    store.close()


def test_a_damaged_step_is_passed_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 3, 6, 9)
    for step, size in ((9, 0), (6, -1)):
        file = tmp_path / f"step_0000000{step}.safetensors"
        file.write_bytes(file.read_bytes()[:size])
    with pytest.warns(UserWarning, match=r"^step \d is damaged: ") as caught:
        _, store, (done, *_) = begin(tmp_path)
    assert [str(one.message)[:6] for one in caught] == ["step 9", "step 6"]
    assert done == 3
    store.close()
    os.truncate(tmp_path / "step_00000003.safetensors", 99)
    text = r"intact: step 9 is .*; step 6 is .*; step 3 is"
    with pytest.raises(ResumeError, match=text):
        begin(tmp_path)


@pytest.mark.parametrize("content", ["{", "\xff", '{"run": {"task": "small", "epochs": 5}}'])
def test_a_damaged_file_of_the_run_is_written_again(content: str, tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    file = tmp_path / "run.json"
    whole = file.read_bytes()
    file.write_text(content, "latin-1")
    _, store, (done, *_) = begin(tmp_path)
    store.close()
    assert done == 2
    assert file.read_bytes() == whole


@pytest.mark.parametrize("metadata", [None, {"run": "the user's"}])
def test_checkpoints_that_do_not_say_whose_they_are_are_left_alone(
    metadata: dict[str, str] | None, tmp_path: Path
) -> None:
    with jt.CheckpointStore(tmp_path) as store:
        store.save(2, {"train": small_state(2)}, metadata=metadata)
    with pytest.raises(ResumeError, match="cannot be resumed: step 2 does not record its"):
        begin(tmp_path)
    assert not (tmp_path / "run.json").exists()


def test_other_options_are_said_before_other_shapes(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    text = "of another run:\n  epochs: the run has 3, this call 5\n  heads: the run has the default, this call 2$"
    with pytest.raises(ResumeError, match=text):
        begin(tmp_path, epochs=5, heads=2)


@pytest.mark.full
@pytest.mark.timeout(150)
def test_a_second_run_in_a_folder_fails_at_once_and_a_killed_one_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["train", "digits", "--train-size", "64", "--checkpoint-dir", str(tmp_path)]
    call += ["--epochs", "1000000", "--policy", "float32", "--resume"]
    command = [sys.executable, "-m", "jmp_train", *call]
    call += ["--seed", "1", "--logdir", str(logdir := tmp_path / "log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            for _ in range(3):
                process.stdout.readline()
            before = (tmp_path / "run.json").read_bytes()
            assert main(call) == 2
        finally:
            process.kill()
        notice = f"jmp-train: {tmp_path} has no checkpoint; starting a new run\n"
        assert process.stderr.readline() == notice
    line = capsys.readouterr().err
    assert line.startswith(f"jmp-train: error: {tmp_path} is in use: process {process.pid} on ")
    assert line.count("\n") == 1
    assert (tmp_path / "run.json").read_bytes() == before
    (tmp_path / "run.json").unlink()
    assert main(call) == 2
    assert not logdir.exists()  # so that the corrected call may write there
    text = f"jmp-train: error: {tmp_path} is of another run:\n  seed: the run has 0, this call 1\n"
    assert capsys.readouterr().err == text
    last = max(jt.CheckpointStore(tmp_path).steps())
    task = first_examples(load_task("digits"), 64)
    with jt.CheckpointStore(tmp_path) as store, jax.numpy_dtype_promotion("standard"):
        answers = iter([False, False, True])
        saving = Saving(store, resume=True, should_stop=lambda: next(answers))
        with pytest.raises(Stopped) as stopped:
            train(task, "float32", RunSettings(epochs=1_000_000, identity={"task": "digits"}), saving=saving)
    assert stopped.value.step == last + 3


def run_of(task: Task, epochs: int = 3, batch_size: int = 2, **settings: Any) -> dict[str, object]:
    settings.setdefault("identity", {"task": "cora", "options": {"synthetic": True, "model": "gcn"}})
    return run_metadata(task, "float32", batch_size, epochs, RunSettings(**settings), task.shared())["run"]


@pytest.fixture(name="cora", scope="module")
def fixture_cora() -> Task:
    return load_task("cora", synthetic=True)


@pytest.mark.full
def test_each_option_is_told(cora: Task) -> None:
    run = run_of(cora)
    other = {"task": "cora", "options": {"synthetic": True, "model": "gat", "image_size": 32}}
    found = differences(run, run_of(cora, 4, 6, seed=1, devices=2, learning_rate=0.5, steps=7, identity=other))
    assert set(found) == {
        "model: the run has gcn, this call gat",
        "devices: the run has 1, this call 2",
        "image_size: the run has the default, this call 32",
        "epochs: the run has 3, this call 4",
        "steps: the run has the default, this call 7",
        "batch_size: the run has 2, this call 6",
        "learning_rate: the run has the default, this call 0.5",
        "seed: the run has 0, this call 1",
    }
    assert differences({**run, "synthetic": False}, {**run, "synthetic": None}) == []  # as 0.1 wrote it of all tasks
    assert differences(run, run_of(cora)) == []
    short = run_of(cora, growth_interval=20)
    assert differences(run, short) == ["growth_interval: the run has the default, this call 20"]
    assert differences(short, run) == ["growth_interval: the run has 20, this call the default"]
    assert "growth_interval" not in run  # as in checkpoints of before there was the option
    small = run_of(cora, few_bits=FewBits(("nu=bfloat16",)))
    assert differences(run, small) == ["state_dtypes: the run has the default, this call ['nu=bfloat16']"]
    assert not {"state_dtypes", "parameters", "fp8"} & run.keys()


def test_the_entries_of_rules_are_told_and_not_where_their_file_is(cora: Task) -> None:
    def metadata(file: str, rules: AutocastRules) -> dict[str, Any]:
        return run_metadata(cora, "torch", 2, 3, RunSettings(rules=RulesFile(Path(file), rules)), None)

    run = metadata("a.toml", TORCH_CUDA)["run"]
    assert differences(run, metadata("b.toml", AutocastRules(*dataclasses.astuple(TORCH_CUDA)))["run"]) == []
    other = metadata("a.toml", TORCH_CUDA.replace(paths={"head": "float32"}))["run"]
    assert differences(run, other) == [f"rules: the run has {run['rules']}, this call {other['rules']}"]
    plain = run_metadata(cora, "torch", 2, 3, RunSettings(), None)
    assert differences(plain["run"], run) == [f"rules: the run has the default, this call {run['rules']}"]
    assert metadata("a.toml", TORCH_CUDA)["rules_file"] == str(Path("a.toml").absolute())
    assert "rules" not in plain["run"]  # as in checkpoints of before there was the option
    assert "rules_file" not in plain
    # What is in checkpoints must not change.
    assert RulesFile(Path("x"), AutocastRules(paths=(("head", "float32"),))).digest == "31f87287d71878b9"


def test_other_data_of_the_same_shapes_is_told(cora: Task) -> None:
    changed = dict(cora.train)
    name = "label"
    changed[name] = changed[name].copy()
    changed[name][-1] += 1
    other = dataclasses.replace(cora, train=changed)
    [line] = differences(run_of(cora), run_of(other))
    assert line.startswith("data: the run has ")
    features = cora.shared()
    digests = {data_digest(cora.train, cora.test, features), data_digest(cora.train, cora.test)}
    assert len(digests) == 2
    few = first_examples(cora, 100)
    assert differences(run_of(cora), run_of(few)) == [
        "train_size: the run has 140, this call 100"  # and not that the data is another, too
    ]


def test_the_digest_has_every_byte_name_shape_and_dtype() -> None:
    train = {"x": np.arange(6, dtype=np.int32), "y": np.ones((2, 3))}
    others: list[tuple[Arrays, Arrays]] = [
        (train, {}),
        ({}, train),
        (train | {"x": train["x"].astype(np.uint32)}, {}),
        (train | {"y": np.ones((3, 2))}, {}),
        (train | {"x": train["x"][::-1]}, {}),
        ({"x": train["x"], "z": train["y"]}, {}),
        (train | {"y": np.ones((2, 0))}, {}),
        (train | {"y": np.ones((2, 3), jnp.bfloat16)}, {}),
    ]
    assert len({data_digest(*one) for one in others}) == len(others)
    assert data_digest(train, {}) == data_digest(dict(reversed(train.items())), {})


def test_files_are_the_same_data_elsewhere_and_other_data_of_other_sizes(tmp_path: Path) -> None:
    digests = []
    for folder, size in (("a", 5), ("b", 5), ("c", 6)):
        paths = [tmp_path / folder / part / f"{n}.jpg" for part in ("u", "v") for n in range(3)]
        for path in paths:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(bytes(size))
        train = {"path": np.array([str(path) for path in paths], object)}
        digests.append(data_digest(train, train))
    assert digests[0] == digests[1] != digests[2]
