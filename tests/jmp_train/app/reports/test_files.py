"""The files that commands write, and the line of JSON that they print."""

import json
from pathlib import Path

import pytest
from plan_rows import DATA_PARALLEL, ODD, found_batch, planned_row

from jmp_train.app.reports import json_line, write_files
from jmp_train.tools.planning import Plan

pytestmark = pytest.mark.quick

PLAN = Plan(
    (planned_row(largest=found_batch(100, 100_000_000)), planned_row("V100-16GB", placement=DATA_PARALLEL)),
)


def test_the_page_is_written_where_it_can_be(tmp_path: Path) -> None:
    file, missing = tmp_path / "made" / "plan.html", tmp_path / "file" / "plan.html"
    (tmp_path / "file").touch()
    text = PLAN.to_html(f"vit {ODD}")
    found = write_files({missing: lambda: text, file: lambda: text, tmp_path / "own": lambda: None})
    assert found == ([file, tmp_path / "own"], [f"{missing}: File exists"])
    assert file.read_text(encoding="utf-8") == text


def test_a_title_that_utf_8_lacks_is_written_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    assert write_files({file: lambda: PLAN.to_html("vit\udcff")})[1] == []
    assert r"vit\udcff" in file.read_text(encoding="utf-8")


def test_json_has_the_rows_and_the_subject() -> None:
    text = json_line({"step": "vit-b16"}, PLAN.to_json())
    assert text.endswith("}\n")
    assert text.count("\n") == 1
    found = json.loads(text)
    assert found["step"] == "vit-b16"
    assert [(row["device"], row["fits"], row["largest_batch"]) for row in found["rows"]] == [
        ("A100-40GB", True, 100), ("V100-16GB", True, None),
    ]  # fmt: skip
    assert found["rows"][0]["tried_batches"] == {"64": 6_400_000_000, "100": 10_000_000_000, "101": 10_100_000_000}
    (sent,) = found["rows"][1]["communication"]
    assert (sent["kind"], sent["group_size"]) == ("all-reduce", 8)
