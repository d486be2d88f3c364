"""The files that commands write, and the line of JSON that they print."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsing import open_browser, show
from made_runs import COSTS, make_run
from plan_rows import DATA_PARALLEL, ODD, found_batch, planned_row
from selenium import webdriver
from selenium.webdriver.common.by import By

from jmp_train.app.reports import json_line, write_files
from jmp_train.app.reports.page import page
from jmp_train.tools.planning import Plan

pytestmark = pytest.mark.quick

RUNS = [
    make_run("float32"),
    dataclasses.replace(
        make_run("mixed_float16", scale=8.0, skips=(3, 60)),
        costs=dataclasses.replace(COSTS, half_flops_share=0.987, residual_bytes=1_500_000),
    ),
    dataclasses.replace(make_run("mixed_bfloat16"), metrics={"test_accuracy": 0.991}),
]


@pytest.fixture(name="browser", scope="module")
def fixture_browser() -> Iterator[webdriver.Chrome]:
    with open_browser() as browser:
        yield browser


@pytest.fixture(name="report", scope="module")
def fixture_report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("report") / "report.html"
    file.write_text(page("mnist", RUNS, [("float64", "it needs <JAX_ENABLE_X64=1>")]))
    return file


def color_of(browser: webdriver.Chrome, selector: str, name: str) -> Any:
    script = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    return browser.execute_script(script, selector, name)


def texts(browser: webdriver.Chrome, selector: str) -> list[str]:
    return [element.text for element in browser.find_elements(By.CSS_SELECTOR, selector)]


def test_the_page_says_all_and_logs_nothing(browser: webdriver.Chrome, report: Path) -> None:
    show(browser, report, 1200, "light")
    assert browser.title == "mnist: float32 / mixed_float16 / mixed_bfloat16"
    items = texts(browser, "body > p")
    assert items[0] == "float64 did not end: it needs <JAX_ENABLE_X64=1>"
    assert texts(browser, "#runs tbody tr") == [
        "float32 3.00 (2.00 to 4.00) 7.5 s 98.70% 0.0100 1 0",
        "mixed_float16 3.00 (2.00 to 4.00) 7.5 s 98.70% 0.0100 2 2",
        "mixed_bfloat16 3.00 (2.00 to 4.00) 7.5 s 99.10% 0.0100 1 0",
    ]
    assert texts(browser, "#costs tr") == [
        "policy flops in half saved ratio parameters state ratio",
        "float32 0.0% 3 MB 1.00x 200 kB 601 kB 1.00x",
        "mixed_float16 98.7% 1.5 MB 0.50x 200 kB 601 kB 1.00x",
        "mixed_bfloat16 0.0% 3 MB 1.00x 200 kB 601 kB 1.00x",
    ]
    assert texts(browser, "#speed tr") == [
        "run iterations/s samples/s s/epoch speed-up",
        "float32 16.7 1066.7 3.00 (2.00 to 4.00) 1.00x",
        "mixed_float16 16.7 1066.7 3.00 (2.00 to 4.00) 1.00x",
        "mixed_bfloat16 16.7 1066.7 3.00 (2.00 to 4.00) 1.00x",
    ]
    footer = browser.find_element(By.TAG_NAME, "footer").text
    assert texts(browser, "p.soft")[0].startswith("1.00x: float32; saved: what the forward pass of a step leaves")
    assert "of training alone, without compilation" in footer
    assert footer.endswith(
        "Peak memory of the process, with libraries, compiler and data: float32 300 MB, "
        "mixed_float16 300 MB, mixed_bfloat16 300 MB."
    )
    titles = [svg.get_attribute("aria-label") for svg in browser.find_elements(By.CSS_SELECTOR, ".panels svg")]
    assert titles == [
        "Training loss",
        "Loss scale (a cross is a skipped step)",
        "Seconds an epoch, and to compile",
        "Flops in half precision",
        "Saved for the backward pass",
        "Parameters, and the whole state",
    ]
    assert len(browser.find_elements(By.TAG_NAME, "details")) == 3
    assert browser.get_log("browser") == []


@pytest.mark.parametrize("width", [360, 768, 1200])
def test_the_page_fits_its_screen_and_its_text_can_be_read(browser: webdriver.Chrome, report: Path, width: int) -> None:
    show(browser, report, width, "light")
    page = browser.execute_script("return document.documentElement.scrollWidth")
    assert page <= width
    for panel in browser.find_elements(By.CSS_SELECTOR, ".panels svg"):
        assert panel.rect["width"] > min(0.85 * width, 400)
        heights = [text.rect["height"] for text in panel.find_elements(By.TAG_NAME, "text")]
        assert heights
        assert min(heights) > 7  # the exponents, at the foot of the scale


def test_light_and_dark(browser: webdriver.Chrome, report: Path) -> None:
    colors = {}
    for scheme in ("light", "dark"):
        show(browser, report, 800, scheme)
        paper = color_of(browser, "body", "backgroundColor")
        ink = color_of(browser, "body", "color")
        title = color_of(browser, ".panels svg text", "fill")
        assert title == ink
        colors[scheme] = [sum(map(int, x[4:-1].split(","))) / 3 for x in (paper, ink)]
    assert colors["light"][0] > 230
    assert colors["light"][1] < 60
    assert colors["dark"][0] < 60
    assert colors["dark"][1] > 200


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
