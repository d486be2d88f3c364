import dataclasses
import json
import math

import pytest
from made_runs import make_run

from jmp_train.app.runs.events import Progress, StepRecord, event_to_json

pytestmark = pytest.mark.quick


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
