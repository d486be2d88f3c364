"""The charts of a comparison: their curves, bars and legends.

Notes about runs.
"""

import dataclasses
import math

import pytest
from made_runs import COSTS, make_run

from jmp_train.app.reports import explanations
from jmp_train.app.reports.run_charts import loss_scales, losses, panels
from jmp_train.app.reports.tables import watch_table
from jmp_train.tools.documents import Box, Chart, Dot, Label, Polyline, svg

pytestmark = pytest.mark.quick

RUNS = [make_run("float32"), make_run("mixed_float16", scale=8.0, skips=(3, 60))]
HALF = dataclasses.replace(
    make_run("half"), costs=dataclasses.replace(COSTS, half_flops_share=0.5, residual_bytes=None)
)


def paths(chart: Chart) -> list[Polyline]:
    return [mark for mark in chart.marks if isinstance(mark, Polyline)]


def legends(chart: Chart) -> list[str]:
    return [style.legend for style in chart.legend]


def bars(chart: Chart) -> list[tuple[float, str]]:
    """Returns the lengths of a chart's bars, and the texts next to them."""
    lengths = [mark.right - mark.left for mark in chart.marks if isinstance(mark, Box)]
    texts = [mark.text for mark in chart.marks if isinstance(mark, Label) and mark.anchor == "start"]
    return list(zip(lengths, texts, strict=True))


def test_a_run_has_its_color_in_all_panels_and_a_legend_once() -> None:
    charts = panels([*RUNS, HALF])
    assert len({chart.title for chart in charts}) == 6
    one, other, *rest = [
        mark.style.color for chart in charts for mark in chart.marks[:1] if not isinstance(mark, Label)
    ]
    assert one != other  # only the second run has a loss scale
    assert rest == [one] * 4
    assert [len(legends(chart)) for chart in charts] == [3, 1, 0, 0, 0, 0]
    assert "light-dark(#4477aa" not in svg(charts[0])  # the runs' colors are seen on white and on black


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
    assert full.style.dash != half.style.dash


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
    assert bars(panels([RUNS[0], HALF])[3]) == [(0.0, "0.0%"), (0.5, "50.0%")]
    assert bars(panels([RUNS[0], HALF])[4]) == [(3_000_000, "3 MB"), (0, "none")]
    assert bars(panels(RUNS[:1])[5]) == [(200_000, "200 kB"), (601_000, "601 kB in all")]


def test_the_peak_of_a_device_is_a_bar_and_that_of_a_process_a_footnote() -> None:
    device = dataclasses.replace(HALF, memory_of="device")
    assert bars(panels([device])[5])[-1] == (300e6, "300 MB peak")
    assert len(bars(panels([device])[5])) == len(bars(panels([HALF])[5])) + 1


def test_a_run_whose_losses_are_all_lost_can_be_drawn() -> None:
    run = make_run(skips=tuple(range(1, 101)))
    assert all(math.isnan(step.loss) for step in run.steps)
    charts = panels([dataclasses.replace(run, memory_of="device")])
    assert all("NaN" not in svg(chart) and "nan" not in svg(chart) for chart in charts)


def test_the_worst_group_of_what_was_watched_is_named() -> None:
    shares = {"lost_updates": {"Conv_0": 0.25, "Dense_0": 0.5}, "underflow": {"Conv_0": 0.0, "Dense_0": 0.0}}
    runs = [make_run("float32"), dataclasses.replace(make_run("float16"), watch=shares)]
    assert watch_table(runs).plain_rows == [["float16", "50.0% (Dense_0)", "0"]]


def test_outputs_that_are_not_finite_are_noted() -> None:
    bad = dataclasses.replace(make_run("naive"), metrics={"test_accuracy": 0.5, "nonfinite_outputs": 3})
    text = "naive: for 3 of the test data the model's output is not finite, which counts as wrong"
    assert explanations([make_run(), bad]) == [text]


def test_a_file_of_rules_is_noted() -> None:
    ruled = dataclasses.replace(make_run("torch"), rules="folder/rules.toml")
    assert explanations([make_run(), ruled]) == ["torch: autocast by the rules of folder/rules.toml"]
