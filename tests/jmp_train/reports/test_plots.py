import dataclasses
import re
import struct
from xml.etree import ElementTree

import numpy as np
import pytest
from helpers import COSTS, make_run
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from jmp_train.reports.plots import (
    PANELS,
    Panel,
    draw_half_flops,
    draw_loss_scales,
    draw_losses,
    draw_saved,
    draw_state,
    png,
    svg,
)
from jmp_train.runs.events import Run

pytestmark = pytest.mark.quick

RUNS = [make_run("float32"), make_run("mixed_float16", scale=8.0, skips=(3, 60))]


@pytest.mark.full
@pytest.mark.parametrize("name", PANELS)
def test_a_panel_is_well_formed_and_in_the_color_of_the_page(name: str) -> None:
    text = svg(name, RUNS)
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("svg")
    assert root.get("aria-label")
    assert "currentColor" in text
    assert "<style" not in text.replace('<style type="text/css">*{stroke-linejoin', "")
    assert text == svg(name, RUNS)


@pytest.mark.full
def test_panels_share_no_id() -> None:
    ids = [i for name in PANELS for i in re.findall(r'\bid="([^"]+)"', svg(name, RUNS))]
    assert len(ids) == len(set(ids)) > 0
    for name in PANELS:
        text = svg(name, RUNS)
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text)
        assert {a or b for a, b in used} <= set(re.findall(r'\bid="([^"]+)"', text))


def test_losses_are_averaged_and_skipped_steps_left_out() -> None:
    axes = Figure().subplots()
    draw_losses(axes, RUNS)
    full, half = axes.lines
    assert [line.get_label() for line in axes.lines] == ["float32", "mixed_float16"]
    steps, losses = map(np.asarray, full.get_data())
    assert len(steps) == 50
    assert steps[0] == 1.5
    assert losses[0] == pytest.approx((1 + 1 / 2) / 2)
    steps, losses = map(np.asarray, half.get_data())
    assert len(steps) == 49
    assert losses[1] == pytest.approx((1 / 4 + 1 / 5) / 2)  # step 3 was skipped
    assert full.get_linestyle() != half.get_linestyle()


def test_the_scale_has_its_history_and_its_skips() -> None:
    axes = Figure().subplots()
    draw_loss_scales(axes, RUNS)
    history, crosses = axes.lines
    assert history.get_label() == "mixed_float16"
    assert np.asarray(history.get_ydata())[[0, 1, 2, 58, 59]].tolist() == [8, 8, 4, 4, 2]
    assert np.column_stack([np.asarray(axis) for axis in crosses.get_data()]).tolist() == [
        [3, 4],
        [60, 2],
    ]
    assert crosses.get_marker() == "x"


def test_runs_without_a_scale_are_said_to_have_none() -> None:
    axes = Figure().subplots()
    draw_loss_scales(axes, RUNS[:1])
    assert [text.get_text() for text in axes.texts] == ["no run has a loss scale"]
    assert "no run has a loss scale" in svg("loss_scales", RUNS[:1])


HALF = dataclasses.replace(
    make_run("half"), costs=dataclasses.replace(COSTS, half_flops_share=0.5, residual_bytes=None)
)


def bars(draw: Panel, *runs: Run) -> list[tuple[float, str]]:
    """Returns the lengths of a panel's bars, and what is written beside them."""
    axes = Figure().subplots()
    draw(axes, runs)
    lengths = [bar.get_width() for bar in axes.patches if isinstance(bar, Rectangle)]
    return list(zip(lengths, [text.get_text() for text in axes.texts], strict=True))


def test_costs_are_the_lengths_of_bars() -> None:
    assert bars(draw_half_flops, RUNS[0], HALF) == [(0.0, "0.0%"), (0.5, "50.0%")]
    assert bars(draw_saved, RUNS[0], HALF) == [(3_000_000, "3 MB"), (0, "none")]
    assert bars(draw_state, RUNS[0]) == [(200_000, "200 kB"), (601_000, "601 kB in all")]


def test_the_peak_of_a_device_is_a_bar_and_that_of_a_process_a_footnote() -> None:
    device = dataclasses.replace(HALF, memory_of="device")
    assert bars(draw_state, device)[-1] == (300e6, "300 MB peak")
    assert len(bars(draw_state, device)) == len(bars(draw_state, HALF)) + 1


def test_png_has_all_six_panels_at_a_readable_size() -> None:
    content = png("digits", RUNS)
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1800, 900)


@pytest.mark.full
def test_a_run_whose_losses_are_all_lost_can_be_drawn() -> None:
    run = make_run(skips=tuple(range(1, 101)))
    assert svg("losses", [run])
    assert png("digits", [dataclasses.replace(run, memory_of="device")])
