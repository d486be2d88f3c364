"""A plan as text.

The page of a plan.
"""

import dataclasses
import html
import re
from collections.abc import Sequence

import pytest
from plan_rows import DATA_PARALLEL, ODD, STEP_BYTES, found_batch, planned_row

from jmp_train.tools.planning import Plan, PlanRow

pytestmark = pytest.mark.quick

ROWS = (
    planned_row(largest=found_batch(100, 100_000_000)),
    planned_row("T4-16GB", "mixed_float16", kinds={"parameters": 30 * 10**9}),
)


def test_the_table_has_a_line_for_each_row_and_how_to_search() -> None:
    lines = str(Plan(ROWS)).splitlines()
    heads = ["device", "policy", "batch", "memory", "of", "fits", "largest batch", "least time", "bound by"]
    assert re.split(" {2,}", lines[0]) == heads
    assert lines[1].startswith("A100-40GB  float32        64     9.00 GB   ")
    assert "  yes   100 " in lines[1]
    assert lines[2].startswith("T4-16GB    mixed_float16  64     30.00 GB  ")
    assert "  no  " in lines[2]
    assert lines[1].endswith("  arithmetic")
    assert lines[3].startswith("PlanSearch(placement=True) tries to make steps fit")
    assert lines[-1].startswith("memory: what each device allocates for a step")
    assert "tries to" not in str(Plan(ROWS[:1]))


def test_columns_without_anything_in_them_are_left_out() -> None:
    placed = dataclasses.replace(ROWS[0], placement=DATA_PARALLEL)
    head = str(Plan((placed,))).splitlines()[0]
    assert "placement" in head
    assert "cost" not in head


def test_the_largest_buffers_come_with_their_lines() -> None:
    text = Plan(ROWS[:1]).largest_buffers(2)
    title, head, first, second = text.splitlines()
    assert title == "A100-40GB, float32, 1 device, batch 64, of 9.00 GB:"
    assert head.split() == ["bytes", "share", "kind", "operation", "dtype", "shape", "from"]
    assert first.startswith("4.67 GB  51.8%  saved for the backward pass  op ")
    assert "model.py:7" in first
    assert second.startswith("2.33 GB")


def test_rows_know_what_is_left() -> None:
    fits, does_not = ROWS
    assert fits.headroom_bytes == fits.usable_bytes - 9_002_001_000 > 0
    assert does_not.headroom_bytes < 0
    assert (fits.fits, does_not.fits) == (True, False)
    assert dataclasses.replace(fits, peak_bytes=fits.usable_bytes).fits
    assert does_not.largest_batch is None
    assert fits.to_json(buffers=1)["buffers"] == [vars(fits.buffers[0])]


LARGE = {**STEP_BYTES, "saved for the backward pass": 12_000_000_000}
PAGE_ROWS = (
    planned_row("V100-16GB", f"own {ODD}", kinds=LARGE, largest=found_batch(40, 200_000_000)),
    planned_row("V100-16GB", "mixed_float16", dtype="f16", largest=found_batch(100, 100_000_000)),
    planned_row("A100-40GB", f"own {ODD}", largest=found_batch(0, 40_000_000_000)),
    planned_row("A100-40GB", "mixed_float16", dtype="f16", placement=DATA_PARALLEL),
)


def page(rows: Sequence[PlanRow], title: str = "Plan") -> str:
    return Plan(tuple(rows)).to_html(title)


def test_the_page_has_all_rows_and_links_to_their_folds() -> None:
    text = page(PAGE_ROWS, f"vit {ODD}")
    assert re.findall('href="([^"]*)"', text) == ["data:,", *(f"#row-{number}" for number in range(1, 5))]
    assert re.findall(' id="([^"]*)"', text) == ["rows", *(f"row-{number}" for number in range(1, 5))]
    text = html.unescape(re.sub("<[a-z/!][^>]*>", "", text))
    for said in (
        f"vit {ODD}", f"own {ODD}", f"of its own {ODD}", f"op {ODD}", f"model.py:7 ({ODD})", f"Dense_{ODD}",
        "8 devices, zero1", "Largest buffers at the peak", "least time: a roofline",
    ):  # fmt: skip
        assert said in text, said


def test_every_row_is_in_the_table() -> None:
    table = page(PAGE_ROWS).split('<table id="rows">')[1].split("</table>")[0]
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert [re.sub("<[^>]*>", "", cells[0]) for cells in lines] == [row.device for row in PAGE_ROWS]
    assert [cells[3] for cells in lines] == ["64"] * 4
    assert [cells[4] for cells in lines] == ["14.00 GB", "9.00 GB", "9.00 GB", "9.00 GB"]
    assert [cells[6] for cells in lines] == ["no", "yes", "yes", "yes"]
    assert [cells[7] for cells in lines] == ["40", "100", "0", ""]
    assert table.count('class="misfit text"') == 1


def test_a_fold_has_buffers_and_communication() -> None:
    folds = page(PAGE_ROWS).split("<details>")[1:]
    assert "<td>8 GB</td><td>57.1%</td>" in folds[0]
    assert "all-reduce" in folds[0]
    assert '<td class="text">all-reduce</td>' in folds[3]
    assert "<td>1</td><td>8</td><td>32.8 kB</td><td>57.3 kB</td>" in folds[3]
    many = planned_row(kinds={f"kind {i}": 1000 * (100 - i) for i in range(25)})
    fold = page([many]).split("<details>")[1]
    assert "kind 19<" in fold
    assert "kind 20<" not in fold


def test_memory_by_kind_has_a_column_per_row() -> None:
    table = page(PAGE_ROWS).split("Memory at the peak by kind")[1].split("</table>")[0]
    (saved,) = (line for line in table.split("<tr>") if "saved for the backward pass" in line)
    assert re.findall(r"<td>(.*?)</td>", saved) == ["12.00 GB", "7.00 GB", "7.00 GB", "7.00 GB"]


def test_pages_of_one_row_and_of_none() -> None:
    one = page([planned_row()])
    assert "1 device" not in one.split("</table>")[0]  # placements only where they differ
    misfit = page([planned_row("V100-16GB", kinds=LARGE, largest=found_batch(0, 40_000_000_000))])
    assert "PlanSearch(placement=True)" in misfit
    assert "row-1" not in page([])
