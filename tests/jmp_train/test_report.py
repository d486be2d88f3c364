import json
import math
from pathlib import Path

import pytest

from jmp_train.report import (
    epoch_from_json,
    epoch_json,
    epoch_line,
    print_table,
    report,
    write_report,
)
from jmp_train.training import Epoch, Run

EPOCH = Epoch(
    epoch=1, loss=0.5, learning_rate=1e-3, seconds=2.0, memory_mb=300.0, loss_scale=65536.0,
    skipped_steps=3,
)  # fmt: skip
BAD = Epoch(2, math.nan, 1e-3, 4.0, 310.0, 32768.0, 4)


def test_numbers_that_are_not_finite_become_null() -> None:
    content = report("digits", [Run("float16", 0.5, (EPOCH, BAD))])
    assert content["runs"][0]["epochs"][1]["loss"] is None
    json.dumps(content, allow_nan=False)


def test_an_epoch_survives_json() -> None:
    assert epoch_from_json(json.loads(json.dumps(epoch_json(EPOCH)))) == EPOCH
    assert math.isnan(epoch_from_json(epoch_json(BAD)).loss)


def test_the_line_of_an_epoch() -> None:
    assert epoch_line("float16", EPOCH, 10) == (
        "float16         epoch  1/10  loss 0.5000  learning rate 1.00e-03  2.00 s  "
        "peak memory 300 MB  loss scale 65536  skipped steps 3"
    )


def test_the_table_holds_the_runs_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Run("a", 0.5, (EPOCH, BAD)), Run("b", 0.987, (EPOCH,))], "device")
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["a", "3.00", "310", "MB", "50.00%", "nan", "32768", "4"] in rows
    assert ["b", "2.00", "300", "MB", "98.70%", "0.5000", "65536", "3"] in rows


def test_a_failing_write_keeps_the_earlier_report(tmp_path: Path) -> None:
    path = write_report(tmp_path, {"task": "digits"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_report(tmp_path, {"task": math.nan})
    assert json.loads(path.read_text()) == {"task": "digits"}
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]
