"""A plan as text."""

import dataclasses
import re

import pytest
from plan_rows import DATA_PARALLEL, found_batch, planned_row

from jmp_train.tools.planning import Plan

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
