import dataclasses
import math
import re
import struct
from xml.etree import ElementTree

import pytest
from helpers import COSTS, make_run

from jmp_train.policies.documents import Box, Chart, Dot, Label, Path, svg
from jmp_train.reports.charts import half_flops, loss_scales, losses, panels, saved, state
from jmp_train.reports.png import png

pytestmark = pytest.mark.quick

RUNS = [make_run("float32"), make_run("mixed_float16", scale=8.0, skips=(3, 60))]
HALF = dataclasses.replace(
    make_run("half"), costs=dataclasses.replace(COSTS, half_flops_share=0.5, residual_bytes=None)
)


def paths(chart: Chart) -> list[Path]:
    return [mark for mark in chart.marks if isinstance(mark, Path)]


def legends(chart: Chart) -> list[str]:
    return [style.legend for style in chart.styles.values() if style.legend]


def bars(chart: Chart) -> list[tuple[float, str]]:
    """Returns the lengths of a chart's bars, and the texts next to them."""
    lengths = [mark.right - mark.left for mark in chart.marks if isinstance(mark, Box)]
    texts = [mark.text for mark in chart.marks if isinstance(mark, Label) and mark.anchor == "start"]
    return list(zip(lengths, texts, strict=True))


@pytest.mark.parametrize("number", range(6))
def test_a_panel_is_well_formed_and_in_the_colors_of_the_page(number: int) -> None:
    chart = panels(RUNS)[number]
    text = svg(chart)
    root = ElementTree.fromstring(text)
    assert (root.get("id"), root.get("aria-label")) == (chart.name, chart.title)
    assert chart.title in [part.text for part in root.iter("text")]
    assert "light-dark" not in text  # the runs' colors are seen on white and on black
    assert text == svg(panels(RUNS)[number])


def test_panels_share_no_id() -> None:
    ids = [i for chart in panels(RUNS) for i in re.findall(r'\bid="([^"]+)"', svg(chart))]
    assert len(ids) == len(set(ids)) == 6


def test_losses_are_averaged_and_skipped_steps_left_out() -> None:
    chart = losses(RUNS)
    full, half = paths(chart)
    assert legends(chart) == ["float32", "mixed_float16"]
    (points,) = full.runs
    assert len(points) == 50
    assert points[0] == (1.5, pytest.approx((1 + 1 / 2) / 2))
    (points,) = half.runs
    assert len(points) == 49
    assert points[1][1] == pytest.approx((1 / 4 + 1 / 5) / 2)  # step 3 was skipped
    assert chart.styles[full.style].dash != chart.styles[half.style].dash


def test_the_scale_has_its_history_and_its_skips() -> None:
    chart = loss_scales(RUNS)
    (history,) = paths(chart)
    assert legends(chart) == ["mixed_float16"]
    assert list(history.runs[0]) == [(1, 8), (3, 8), (3, 4), (60, 4), (60, 2), (100, 2)]
    crosses = [mark for mark in chart.marks if isinstance(mark, Dot)]
    assert [(cross.x, cross.y, cross.is_cross) for cross in crosses] == [(3, 4, True), (60, 2, True)]


def test_runs_without_a_scale_are_said_to_have_none() -> None:
    assert "no run has a loss scale" in svg(loss_scales(RUNS[:1]))
    assert "no run has a loss scale" not in svg(loss_scales(RUNS))


def test_costs_are_the_lengths_of_bars() -> None:
    assert bars(half_flops([RUNS[0], HALF])) == [(0.0, "0.0%"), (0.5, "50.0%")]
    assert bars(saved([RUNS[0], HALF])) == [(3_000_000, "3 MB"), (0, "none")]
    assert bars(state(RUNS[:1])) == [(200_000, "200 kB"), (601_000, "601 kB in all")]


def test_the_peak_of_a_device_is_a_bar_and_that_of_a_process_a_footnote() -> None:
    device = dataclasses.replace(HALF, memory_of="device")
    assert bars(state([device]))[-1] == (300e6, "300 MB peak")
    assert len(bars(state([device]))) == len(bars(state([HALF]))) + 1


def test_png_has_all_six_panels_at_a_readable_size() -> None:
    content = png(panels(RUNS), "digits", "a footnote")
    assert content.startswith(b"\x89PNG")
    assert struct.unpack(">II", content[16:24]) == (1800, 900)


def test_a_run_whose_losses_are_all_lost_can_be_drawn() -> None:
    run = make_run(skips=tuple(range(1, 101)))
    assert all(math.isnan(step.loss) for step in run.steps)
    charts = panels([dataclasses.replace(run, memory_of="device")])
    assert all("NaN" not in svg(chart) and "nan" not in svg(chart) for chart in charts)
    assert png(charts, "digits", "")
