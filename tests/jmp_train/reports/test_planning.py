"""The compilations of a plan as they are shown, its page and its JSON."""

import io
import json
import re
from pathlib import Path

import pytest
from plan_rows import DATA_PARALLEL, ODD, found_batch, planned_row

from jmp_train.planning import Allowances, Plan
from jmp_train.reports import compilations_shown, json_line, write_plan

pytestmark = pytest.mark.quick

PLAN = Plan(
    (planned_row(largest=found_batch(100, 100_000_000)), planned_row("V100-16GB", placement=DATA_PARALLEL)),
    Allowances(),
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_the_compilations_and_nothing_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with compilations_shown(stream) as progress:
        assert progress is not None
        progress(0, "V100-16GB, float32, 1 device, batch 64")
        progress(3, "V100-16GB, [bold]float32, 1 device, batch 128")
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", stream.getvalue())
    assert "3 compiled, next V100-16GB, [bold]float32, 1 device, batch 128" in text
    assert stream.getvalue().endswith("\x1b[2K")  # the line is cleared


def test_what_is_no_terminal_gets_nothing() -> None:
    stream = io.StringIO()
    with compilations_shown(stream) as progress:
        assert progress is None
    assert stream.getvalue() == ""


def test_the_page_is_written_where_it_can_be(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert write_plan(file, f"vit {ODD}", PLAN) == ([file], [])
    assert file.read_text(encoding="utf-8") == PLAN.to_html(f"vit {ODD}")
    assert write_plan(None, "vit", PLAN) == ([], [])
    missing = tmp_path / "missing" / "plan.html"
    assert write_plan(missing, "vit", PLAN) == ([], [f"{missing}: No such file or directory"])


def test_a_title_that_utf_8_lacks_is_written_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert write_plan(file, "vit\udcff", PLAN)[1] == []
    assert r"vit\udcff" in file.read_text(encoding="utf-8")


def test_json_has_the_rows_and_the_subject() -> None:
    text = json_line({"step": "vit-b16"}, PLAN.to_json())
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    found = json.loads(text)
    assert found["step"] == "vit-b16"
    assert found["allowances"]["memory_fraction"] == 0.75
    assert [(row["gpu"], row["fits"], row["largest_batch"]) for row in found["rows"]] == [
        ("A100-40GB", True, 100), ("V100-16GB", True, None),
    ]  # fmt: skip
    assert found["rows"][0]["tried_batches"] == {"64": 6_400_000_000, "100": 10_000_000_000, "101": 10_100_000_000}
    (sent,) = found["rows"][1]["communication"]
    assert (sent["kind"], sent["group_size"]) == ("all-reduce", 8)
