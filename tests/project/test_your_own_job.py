"""The command of the page about users' jobs runs on its file, and prints what the page shows but for times."""

import re
from pathlib import Path

import pytest
from process_helpers import run_python

pytestmark = pytest.mark.full

PAGE = (Path(__file__).parents[2] / "docs" / "your_own_job.md").read_text()
JOB, COMMAND, SHOWN = (
    re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0] for kind in ("python", "sh", "text")
)


def shape(text: str) -> list[str]:
    """Returns the lines without numbers and without the width of columns."""
    lines = [" ".join(re.sub(r"\d[\d.]*", "#", line).split()) for line in text.splitlines()]
    return [line for line in lines if line.strip("─ ")]


@pytest.mark.timeout(300)
def test_the_command_prints_what_the_page_shows(tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    output = run_python("-m", "jmp_train", *COMMAND.split()[1:], cwd=tmp_path, COLUMNS="150")
    tables = output[output.index(" policy ") :]
    results, written = (shape(part) for part in SHOWN.split("\n\n"))
    lines = shape(tables)
    assert lines[: len(results)] == results
    assert lines[-len(written) :] == written
    costs = lines[len(results)]  # which the page omits
    assert costs == "policy flops in half saved ratio parameters state ratio"
    found, wanted = ([float(x) for x in re.findall(r"([\d.]+)% +[\d.]+ +\d+", text)] for text in (tables, SHOWN))
    assert len(found) == 3
    assert found == pytest.approx(wanted, abs=2)
