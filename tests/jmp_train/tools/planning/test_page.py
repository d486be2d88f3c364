"""The page of a plan, and its charts to scale."""

import dataclasses
import html
import math
import re
from collections.abc import Sequence

import pytest
from plan_rows import DATA_PARALLEL, ODD, STEP_BYTES, costs_without_products, found_batch, planned_row

from jmp_train.tools.aot import GPUS
from jmp_train.tools.documents import Box, Chart, Dot, Label, Path, placed, series_styles
from jmp_train.tools.planning import Allowances, Plan, PlanRow
from jmp_train.tools.planning.charts import batch_chart, kernel_points, memory_chart, roofline_chart, step_point
from jmp_train.tools.planning.details import costliest_first

pytestmark = pytest.mark.quick

LARGE = {**STEP_BYTES, "activations saved for the backward pass": 12_000_000_000}
ROWS = (
    planned_row("V100-16GB", f"own {ODD}", kinds=LARGE, largest=found_batch(40, 200_000_000)),
    planned_row("V100-16GB", "mixed_float16", dtype="f16", largest=found_batch(100, 100_000_000)),
    planned_row("A100-40GB", f"own {ODD}", largest=found_batch(0, 40_000_000_000)),
    planned_row("A100-40GB", "mixed_float16", dtype="f16", placement=DATA_PARALLEL),
)


def page(rows: Sequence[PlanRow], title: str = "Plan") -> str:
    return Plan(tuple(rows), Allowances()).to_html(title)


def bars(rows: Sequence[PlanRow]) -> list[Box]:
    """Returns the pieces of the bars of the memory."""
    chart = memory_chart(rows)
    assert chart is not None
    return [mark for mark in chart.marks if isinstance(mark, Box)]


def marks(rows: Sequence[PlanRow]) -> list[float]:
    """Returns the places of the marks across the bars of the memory."""
    chart = memory_chart(rows)
    assert chart is not None
    return [mark.runs[0][0][0] for mark in chart.marks if isinstance(mark, Path)]


def texts(chart: Chart | None) -> dict[str, str]:
    """Returns the texts in a chart with their colors."""
    assert chart is not None
    return {mark.text: str(mark.color) for mark in chart.marks if isinstance(mark, Label)}


def roofline(row: PlanRow) -> Chart:
    chart = roofline_chart(row.gpu, [row], series_styles([row.policy]))
    assert chart is not None
    return chart


def lines(chart: Chart) -> list[list[tuple[float, float]]]:
    """Returns the lines of the roofs in pixels: the slope first, then from the lowest roof to the highest."""
    drawn = [mark for mark in placed(chart, is_whole=False)[0] if isinstance(mark, Path) and mark.style.width == 1.5]
    return [[*mark.runs[0]] for mark in drawn]


def dots(chart: Chart, opacity: float) -> list[tuple[float, float]]:
    """Returns the dots of kernels, which are pale, or of steps in pixels."""
    drawn = [mark for mark in placed(chart, is_whole=False)[0] if isinstance(mark, Dot)]
    return [(mark.x, mark.y) for mark in drawn if mark.style.opacity == opacity]


def test_the_page_has_all_rows_and_links_to_their_folds() -> None:
    text = page(ROWS, f"vit {ODD}")
    assert re.findall('href="([^"]*)"', text) == ["data:,", *(f"#row-{number}" for number in range(1, 5))]
    assert re.findall(' id="([^"]*)"', text) == ["summary", "rows", *(f"row-{number}" for number in range(1, 5))]
    assert text.count("<svg") == 4  # memory, batches, a roofline for each of two GPUs
    text = html.unescape(re.sub("<[a-z/!][^>]*>", "", text))
    for said in (
        f"vit {ODD}", f"own {ODD}", f"of its own {ODD}", f"op {ODD}", f"model.py:7 ({ODD})", f"Dense_{ODD}",
        f"jt.smaller({ODD})", "my<kernel>", "<dense>/dot_general", "8 devices, zero1",
        "memory_fraction 75%", "cuda_context 0.629 GB", "fragmentation 2%", "Times are lower bounds",
        "3 of 4 fit", "the largest batch is 100, mixed_float16 on V100-16GB, 1 device",
    ):  # fmt: skip
        assert said in text, said


def test_every_row_is_in_the_table() -> None:
    table = page(ROWS).split('<table id="rows">')[1].split("</table>")[0]
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert [re.sub("<[^>]*>", "", cells[0]) for cells in lines] == [row.gpu.name for row in ROWS]
    assert [cells[3] for cells in lines] == ["64"] * 4
    assert [cells[4] for cells in lines] == ["14.00 GB", "9.00 GB", "9.00 GB", "9.00 GB"]
    assert [cells[6] for cells in lines] == ["no", "yes", "yes", "yes"]
    assert [cells[7] for cells in lines] == ["40", "100", "0", ""]
    assert table.count('class="misfit text"') == 1


def test_a_fold_has_buffers_remedies_communication_and_batches() -> None:
    folds = page(ROWS).split("<details>")[1:]
    assert "<td>8 GB</td><td>57.1%</td>" in folds[0]
    assert "<td>7.00 GB</td><td>yes</td><td>12.3 ms</td>" in folds[0]
    assert '<td class="text">smaller &lt;&amp;&#34;&gt;&#39;</td>' in folds[0]
    assert '<td>40</td><td>8.00 GB</td><td>yes</td><td class="text">largest</td>' in folds[0]
    assert '<td>64</td><td>12.80 GB</td><td>no</td><td class="text"></td>' in folds[0]
    assert "What could help" not in folds[1]
    assert "Batches that were compiled" not in folds[3]
    assert "<td>8</td><td>32.8 kB</td><td>57.3 kB</td>" in folds[3]
    assert '<td class="text">all-reduce</td>' in folds[3]


def test_buffers_beyond_the_largest_are_counted() -> None:
    many = planned_row(kinds={f"kind {i}": 1000 * (100 - i) for i in range(25)})
    fold = page([many]).split("<details>")[1]
    assert "5 more have 390 kB." in fold
    assert "kind 19<" in fold
    assert "kind 20<" not in fold


def test_bars_of_kinds_follow_one_another_in_one_order_to_scale() -> None:
    row = planned_row("V100-16GB", kinds={"gradients": 2_000_000_000, "parameters": 6_000_000_000})
    assert [(piece.left, piece.right) for piece in bars([row])] == [(0, 6e9), (6e9, 8e9)]  # parameters are first
    assert marks([row]) == [row.usable_bytes, GPUS["V100-16GB"].memory_bytes]
    chart = memory_chart(ROWS)
    assert texts(chart)["14.00 GB of 12.43 GB"] == "bad"
    assert texts(chart)["9.00 GB of 31.24 GB"] == "soft"
    assert len({piece.style.color for piece in bars(ROWS)}) == len({piece.style.legend for piece in bars(ROWS)}) == 6


def test_marks_far_beyond_the_bars_are_left_out() -> None:
    small = planned_row("H100-80GB", kinds={"parameters": 1_000_000_000})
    assert marks([small]) == []
    chart = memory_chart([small])
    assert chart is not None
    assert chart.x.high == 3e9


def test_the_largest_batches_are_bars_in_the_policies_colors() -> None:
    chart = batch_chart(ROWS)
    assert chart is not None
    own, mixed = (
        mark for mark in chart.marks if isinstance(mark, Box)
    )  # none fits on A100s, and the last row has none
    assert (own.right, mixed.right) == (40, 100)
    assert own.style.color != mixed.style.color
    assert {"40", "100", "none fits", "V100-16GB", "A100-40GB"} <= texts(chart).keys()
    assert batch_chart([planned_row()]) is None


def test_pages_of_one_row_without_a_search_and_of_steps_that_do_not_fit() -> None:
    one = page([planned_row()])
    assert one.count("<svg") == 2
    assert "Largest batch that fits" not in one
    assert "1 device" not in one.split("</table>")[0]  # placements only where they differ
    misfit = planned_row("V100-16GB", kinds=LARGE, largest=found_batch(0, 40_000_000_000))
    text = page([misfit])
    assert '<p id="summary">0 of 1 fits.</p>' in text
    assert ">none fits<" in text
    assert "<svg" not in page([])


def test_a_program_without_matrix_products_has_no_roofline() -> None:
    row = dataclasses.replace(planned_row(), costs=costs_without_products(GPUS["A100-40GB"]))
    assert step_point(row) is None
    assert "Roofline" not in page([row])


def test_points_are_under_the_roofs_and_at_the_steps_rate() -> None:
    row, gpu = ROWS[1], GPUS["V100-16GB"]
    step, (large, small) = step_point(row), kernel_points(row)
    assert step is not None
    operations = 2 * 4097 * 4096 * 8192
    assert step.rate == pytest.approx(operations / row.costs.seconds)
    assert step.rate_without_cache == pytest.approx(operations / row.costs.seconds_without_cache)
    assert large.rate == pytest.approx(gpu.rates["float16"])
    assert small.rate == pytest.approx(gpu.bandwidth * small.intensity)
    assert large.share + small.share < 1  # casts have the rest


def test_roofs_and_points_are_on_one_logarithmic_scale() -> None:
    chart = roofline(ROWS[3])
    slope, *roofs = lines(chart)
    (x1, y1), (x2, y2), (x3, y3) = (roof[0] for roof in roofs)
    assert slope[1] == (x3, y3)  # the slope ends where the highest roof starts
    expected = pytest.approx(math.log(156 / 19.5) / math.log(312 / 156), rel=0.02)
    assert (y1 - y2) / (y2 - y3) == expected
    assert (x2 - x1) / (x3 - x2) == expected
    large, small = dots(chart, 0.6)
    assert large[1] == pytest.approx(y3, abs=0.1)
    (step,) = dots(chart, 1)
    assert small[0] < step[0] < large[0]
    assert step[1] > large[1]


def test_dtypes_of_equal_rates_share_a_roof_and_unused_ones_have_none() -> None:
    labels = [text for text in texts(roofline(ROWS[2])) if ": " in text]
    assert labels == ["float32: 19.5 Tflop/s", "tfloat32: 156 Tflop/s", "bfloat16, float16: 312 Tflop/s"]


def test_roofs_start_within_the_chart_whatever_the_points_are() -> None:
    for row in ROWS:
        assert min(x for line in lines(roofline(row)) for x, _ in line) >= 70


def test_kernels_that_are_alike_count_together() -> None:
    costs = ROWS[1].costs
    large = max(costs.kernels, key=lambda kernel: kernel.seconds)
    again = dataclasses.replace(large, name="again", times=3)
    found = costliest_first(dataclasses.replace(costs, kernels=(*costs.kernels, again)))
    assert (found[0].operation, found[0].times) == ("<dense>/dot_general", 4)
    assert found[0].all_seconds == pytest.approx(4 * large.seconds_without_cache)
    assert len(found) == len(costliest_first(costs))
    assert [kernels.all_seconds for kernels in found] == sorted((k.all_seconds for k in found), reverse=True)
