import dataclasses
import json
import math

import pytest
from made_runs import COSTS, make_run

from jmp_train.app.runs.events import (
    Compiled,
    Epoch,
    Event,
    Phase,
    Planned,
    Progress,
    StepRecord,
    Watched,
    event_from_json,
    event_to_json,
)

pytestmark = pytest.mark.quick

EVENTS = [
    Planned(2, 44),
    Compiled(2.5, "device", COSTS),
    Compiled(2.5, "process", dataclasses.replace(COSTS, residual_bytes=None)),
    Progress(total=10, skipped_steps=1, recent=(StepRecord(1, 0.5, 2.0, 8.0, True),)),
    Progress(10, 1, (StepRecord(1, 0.5, 2.0, 8.0, True),), (Watched(1, {"underflow": {"Dense_0": 0.25}}),)),
    Epoch(1, 0.5, 1e-3, 2.0, 300.0, 65536.0, 3),
    dataclasses.replace(make_run(), metrics={"test_accuracy": 0.5, "nonfinite_outputs": 7}),
    dataclasses.replace(make_run(), watch={"lost_updates": {"Dense_0": 0.25, "Dense_1": 0.0}}),
    dataclasses.replace(make_run(), rules="rules.toml"),
    dataclasses.replace(
        make_run(), metrics={"bits_per_byte": 2.5, "loss": 1.5}, higher_is_better=False, batch_size=None
    ),
    Phase("float32", 90, 100, COSTS),
    dataclasses.replace(make_run(), phases=(Phase("c=f16", 0, 90, COSTS), Phase("float32", 90, 100, COSTS))),
]


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: type(event).__name__)
def test_an_event_survives_json(event: Event) -> None:
    assert event_from_json(json.loads(json.dumps(event_to_json(event), allow_nan=False))) == event


def test_numbers_that_are_not_finite_become_null_and_nan() -> None:
    step = StepRecord(1, math.inf, math.nan, 8.0, False)
    fields = event_to_json(Progress(10, 1, (step,)))
    assert fields["recent"][0]["loss"] is None
    revived = event_from_json(json.loads(json.dumps(fields, allow_nan=False)))
    assert isinstance(revived, Progress)
    assert math.isnan(revived.recent[0].loss)
    assert math.isnan(revived.recent[0].grad_norm)


def test_a_run_sums_itself_up() -> None:
    run = make_run(scale=8.0, skips=(3, 60))
    assert run.epoch_seconds == 3.0  # of 2 and 4
    assert run.memory_mb == 300.0
    assert [step.step for step in run.skipped] == [3, 60]
    assert dataclasses.replace(run, epochs=run.epochs[:1]).epoch_seconds == 2.0
    assert run.iterations_per_second == 50 / 3.0
    assert run.samples_per_second == 64 * 50 / 3.0
