import dataclasses
import json
import math
import resource
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_limits import mounted_tmpfs
from made_runs import make_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jmp_train.app.runs.events import Compiled, Event, Phase, Progress, StepRecord, Watched, event_to_json
from jmp_train.app.runs.run_log import RunLog

pytestmark = pytest.mark.quick

RUN = make_run(scale=8.0, skips=(3,))
ENDS = (RUN.epochs[0], RUN)


def write(directory: Path, *events: Event) -> None:
    """Logs some events, by default those of a run."""
    with RunLog(directory) as log:
        for event in events or (Compiled(7.5, "process", RUN.costs), Progress(100, 1, RUN.steps[:50]), *ENDS):
            log.write(event)


def lines_of(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def scalars(directory: Path, name: str) -> list[tuple[int, float]]:
    """Returns steps and values, as TensorBoard reads them."""
    events = EventAccumulator(str(directory)).Reload()
    return [(x.step, x.value) for x in events.Scalars(name)] if name in events.Tags()["scalars"] else []


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    log = tmp_path / "log" / "float32"
    write(log)
    assert EventAccumulator(str(log)).Reload().Tags()["scalars"] == [
        "step/loss", "step/grad_norm", "step/loss_scale", "step/finite",
        "epoch/loss", "epoch/learning_rate", "epoch/seconds", "epoch/memory_mb",
        "epoch/loss_scale", "epoch/skipped_steps", "test_accuracy",
    ]  # fmt: skip
    assert scalars(log, "step/loss_scale")[:4] == [(1, 8), (2, 8), (3, 4), (4, 4)]
    assert scalars(log, "step/finite")[:4] == [(1, 1), (2, 1), (3, 0), (4, 1)]
    assert scalars(log, "epoch/seconds")[0][1] == 2.0
    assert scalars(log, "test_accuracy") == [(100, pytest.approx(0.987))]


def test_json_lines_have_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    lines = lines_of(tmp_path)
    assert lines[0] == {
        "compile_seconds": 7.5, "half_flops_share": 0.0, "residual_bytes": 3_000_000,
        "params_bytes": 200_000, "opt_state_bytes": 400_000, "model_state_bytes": 1_000,
        "exchanged_bytes": 0,
    }  # fmt: skip
    assert lines[3] == {
        "step": 3, "loss": None, "grad_norm": 1.0, "loss_scale": 4.0, "finite": False,
    }  # fmt: skip
    assert lines[51]["epoch"] == 1
    assert lines[-1] == {"test_accuracy": 0.987}


def test_bits_per_byte_are_logged_with_the_accuracy(tmp_path: Path) -> None:
    write(
        tmp_path,
        dataclasses.replace(RUN, metrics={"test_accuracy": 0.987, "bits_per_byte": 2.5, "nonfinite_outputs": 0}),
    )
    assert lines_of(tmp_path) == [{"test_accuracy": 0.987, "bits_per_byte": 2.5}]
    assert scalars(tmp_path, "bits_per_byte") == [(100, 2.5)]


def test_a_phase_that_begins_is_a_line(tmp_path: Path) -> None:
    write(tmp_path, Phase("float32", 90, 100, RUN.costs))
    assert lines_of(tmp_path) == [{"phase": "float32", "start": 90, "stop": 100}]


def test_what_a_run_watches_is_logged_with_its_steps(tmp_path: Path) -> None:
    watched = tuple(Watched(n, {"underflow": {"Dense_0": n / 4, "norm": 0.0}}) for n in (1, 2))
    write(tmp_path, Progress(100, 1, RUN.steps[:2], watched))
    assert scalars(tmp_path, "step/underflow/Dense_0") == [(1, 0.25), (2, 0.5)]
    first, second = lines_of(tmp_path)
    assert (first["loss"], first["underflow/Dense_0"], second["underflow/Dense_0"]) == (1.0, 0.25, 0.5)


def test_a_run_that_is_killed_leaves_what_it_logged(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(Progress(100, 1, RUN.steps[:50]))
        assert len(lines_of(tmp_path)) == len(scalars(tmp_path, "step/loss")) == 50


def test_runs_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(FileExistsError, match=r"--logdir: .* holds the log of another run"):
        RunLog(tmp_path)


def test_a_full_disk_costs_the_log_some_records_and_the_run_nothing(tmp_path: Path) -> None:
    warnings: list[str] = []

    def write_limited(size: int) -> None:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
        try:
            for _ in range(3):
                log.write(Progress(100, 1, RUN.steps[50:]))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)

    with RunLog(tmp_path, warnings.append) as log:
        log.write(Progress(100, 1, RUN.steps[:50]))
        write_limited(5000)
        log.write(RUN.epochs[0])  # there is space again
    assert warnings == [f"--logdir {tmp_path}: File too large; the log lacks some of the run"]
    lines = lines_of(tmp_path)
    assert [line.get("step") for line in lines] == [*range(1, 51), None]
    assert lines[-1]["epoch"] == 1
    assert [step for step, _ in scalars(tmp_path, "step/loss")] == list(range(1, 51))
    assert scalars(tmp_path, "epoch/seconds")[0][1] == 2.0


@pytest.fixture(name="small_disk")
def fixture_small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yields a folder on a disk of 64 kB and 4 files or folders, the folder included."""
    with mounted_tmpfs(tmp_path / "disk", "size=64k,nr_inodes=4") as directory:
        yield directory


def test_a_disk_that_has_no_room_for_a_log_at_all_costs_the_log(small_disk: Path) -> None:
    warnings: list[str] = []
    with RunLog(small_disk / "a", warnings.append) as log:  # which takes the rest: a folder and two files
        for _ in range(5):
            log.write(Progress(100, 1, RUN.steps))
        assert len(lines_of(small_disk / "a")) % 100 == 0
        with RunLog(small_disk / "b", warnings.append) as none:
            none.write(RUN)
    text = "No space left on device; the log lacks some of the run"
    assert warnings == [f"--logdir {small_disk}/{name}: {text}" for name in "ab"]
    assert not (small_disk / "b").exists()


def test_a_log_that_is_removed_is_said_once(tmp_path: Path) -> None:
    warnings: list[str] = []
    with RunLog(tmp_path / "log", warnings.append) as log:
        shutil.rmtree(tmp_path / "log")
        for _ in range(3):
            log.write(RUN)
    assert warnings == [f"--logdir {tmp_path}/log: it was removed; the log lacks some of the run"]


def test_a_folder_that_cannot_be_made_is_an_error_before_the_run(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"Not a directory: .*file/log"):
        RunLog(tmp_path / "file" / "log")


def test_numbers_that_are_not_finite_become_null_and_what_a_run_lacks_is_left_out() -> None:
    step = StepRecord(1, math.inf, math.nan, 8.0, False)
    fields = event_to_json(Progress(10, 1, (step,)))
    assert fields == {
        "event": "progress", "total": 10, "skipped_steps": 1,
        "recent": [{"step": 1, "loss": None, "grad_norm": None, "loss_scale": 8.0, "finite": False}],
    }  # fmt: skip
    assert {"watch", "rules", "phases"}.isdisjoint(event_to_json(make_run()))
    assert event_to_json(dataclasses.replace(make_run(), rules="rules.toml"))["rules"] == "rules.toml"
    json.dumps(event_to_json(make_run(skips=(3,))), allow_nan=False)


def test_a_run_sums_itself_up() -> None:
    run = make_run(scale=8.0, skips=(3, 60))
    assert run.epoch_seconds == 3.0  # of 2 and 4
    assert run.memory_mb == 300.0
    assert [step.step for step in run.skipped] == [3, 60]
    assert dataclasses.replace(run, epochs=run.epochs[:1]).epoch_seconds == 2.0
    assert run.iterations_per_second == 50 / 3.0
    assert run.samples_per_second == 64 * 50 / 3.0
