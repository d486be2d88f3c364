import json
import time
from pathlib import Path

import pytest
from helpers import make_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jmp_train.records import Compiled, Progress
from jmp_train.run_log import RunLog

RUN = make_run(scale=8.0, skips=(3,))


def write(directory: Path) -> None:
    with RunLog(directory) as log:
        log.write(Compiled(7.5))
        log.write(Progress(100, 1, RUN.steps[:50]))
        log.write(RUN.epochs[0])
        log.write(RUN)


def test_tensorboard_reads_what_was_logged(tmp_path: Path) -> None:
    write(tmp_path / "log" / "float32")
    events = EventAccumulator(str(tmp_path / "log" / "float32")).Reload()
    assert events.Tags()["scalars"] == [
        "step/loss", "step/grad_norm", "step/loss_scale", "step/finite",
        "epoch/loss", "epoch/learning_rate", "epoch/seconds", "epoch/memory_mb",
        "epoch/loss_scale", "epoch/skipped_steps", "test_accuracy",
    ]  # fmt: skip
    scales = events.Scalars("step/loss_scale")
    assert [(scale.step, scale.value) for scale in scales[:4]] == [(1, 8), (2, 8), (3, 4), (4, 4)]
    assert [x.value for x in events.Scalars("step/finite")[:4]] == [1, 1, 0, 1]
    assert events.Scalars("epoch/seconds")[0].value == 2.0
    (accuracy,) = events.Scalars("test_accuracy")
    assert (accuracy.step, accuracy.value) == (100, pytest.approx(0.987))


def test_json_lines_have_the_same(tmp_path: Path) -> None:
    write(tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[0] == {"compile_seconds": 7.5}
    assert lines[3] == {
        "step": 3, "loss": None, "grad_norm": 1.0, "loss_scale": 4.0, "finite": False,
    }  # fmt: skip
    assert lines[51]["epoch"] == 1
    assert lines[-1] == {"test_accuracy": 0.987}


def test_a_run_that_is_killed_leaves_what_it_logged(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.write(Progress(100, 1, RUN.steps[:50]))
        assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 50
        deadline = time.monotonic() + 60
        while _count_losses(tmp_path) < 50:
            assert time.monotonic() < deadline
            time.sleep(0.2)


def _count_losses(directory: Path) -> int:
    events = EventAccumulator(str(directory)).Reload()
    return len(events.Scalars("step/loss")) if "step/loss" in events.Tags()["scalars"] else 0


def test_runs_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path)
    with pytest.raises(FileExistsError, match=r"--logdir: .* holds the log of another run"):
        RunLog(tmp_path)
