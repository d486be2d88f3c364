"""The page of a plan: complete, escaped, without anything from elsewhere, and its pictures to scale."""

import dataclasses
import html.parser
import math
import re
from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from plan_rows import DATA_PARALLEL, ODD, STEP_BYTES, costs_without_products, found_batch, planned_row

from jmp_train.aot import GPUS
from jmp_train.planning import Allowances, Plan, PlanRow
from jmp_train.planning.charts import batch_chart, memory_chart
from jmp_train.planning.kernels import costliest_first
from jmp_train.planning.report import summary
from jmp_train.planning.roofline import kernel_points, roofline_chart, step_point
from jmp_train.policies.documents import svg

pytestmark = pytest.mark.quick

LARGE = {**STEP_BYTES, "activations saved for the backward pass": 12_000_000_000}
ROWS = (
    planned_row("V100-16GB", f"own {ODD}", kinds=LARGE, largest=found_batch(40, 200_000_000)),
    planned_row("V100-16GB", "mixed_float16", dtype="f16", largest=found_batch(100, 100_000_000)),
    planned_row("A100-40GB", f"own {ODD}", largest=found_batch(0, 40_000_000_000)),
    planned_row("A100-40GB", "mixed_float16", dtype="f16", placement=DATA_PARALLEL),
)
_EMPTY_TAGS = {"meta", "link", "br"}


class Page(html.parser.HTMLParser):
    """What a browser would see: tags, attributes, the text; tags have to be closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in _EMPTY_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def page(rows: Sequence[PlanRow], title: str = "Plan") -> str:
    return Plan(tuple(rows), Allowances()).to_html(title)


def memory_picture(rows: Sequence[PlanRow]) -> str:
    return svg(memory_chart(rows))


def batch_picture(rows: Sequence[PlanRow]) -> str:
    chart = batch_chart(rows)
    return "" if chart is None else svg(chart)


def roofline_picture(row: PlanRow) -> str:
    chart = roofline_chart(row.gpu, [row], [row.policy], "roofline-1")
    assert chart is not None
    return svg(chart)


def drawn(figure: str) -> ElementTree.Element:
    """Returns a figure's SVG; it has to be well-formed."""
    return ElementTree.fromstring(figure)


def parts(figure: str, tag: str, name: str) -> list[dict[str, str]]:
    """Returns the attributes of a figure's parts that have a class."""
    return [e.attrib for e in drawn(figure).iter(tag) if name in e.get("class", "").split()]


def starts_and_widths(figure: str) -> list[tuple[float, float]]:
    return [(float(e.attrib["x"]), float(e.attrib["width"])) for e in drawn(figure).iter("rect")]


def mark(figure: str, name: str) -> list[float]:
    """Returns where the marks of a class are, from the left."""
    return [float(e["d"][1:].split()[0]) for e in parts(figure, "path", name)]


def test_the_page_is_whole_and_needs_nothing_else() -> None:
    text = page(ROWS, f"vit {ODD}")
    found = Page(text)
    assert not {"script", "iframe", "img", "object"} & set(found.tags)
    links = [value for name, value in found.attributes if name in ("href", "src")]
    assert links == ["data:,", *(f"#row-{number}" for number in range(1, 5))]
    assert not re.search(r"https?:|url\(|@import", text)
    ids = [value for name, value in found.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    assert {link[1:] for link in links[1:]} <= set(ids)
    assert found.tags.count("details") == len(ROWS)
    assert found.tags.count("svg") == 4  # memory, batches, a roofline for each of two GPUs
    for said in (
        f"vit {ODD}", f"own {ODD}", f"of its own {ODD}", f"op {ODD}", f"model.py:7 ({ODD})", f"Dense_{ODD}",
        f"jt.smaller({ODD})", "my<kernel>", "<dense>/dot_general", "8 devices, zero1",
        "memory_fraction 75%", "cuda_context 0.629 GB", "fragmentation 2%", "Times are lower bounds",
        "3 of 4 fit", "the largest batch is 100, mixed_float16 on V100-16GB, 1 device",
    ):  # fmt: skip
        assert said in found.text, said


def test_every_row_is_in_the_table() -> None:
    table = page(ROWS).split('<table id="rows">')[1].split("</table>")[0]
    lines = [re.findall(r"<td[^>]*>(.*?)</td>", line) for line in table.split("<tr>")[2:]]
    assert [re.sub("<[^>]*>", "", cells[0]) for cells in lines] == [row.gpu.name for row in ROWS]
    assert [cells[3] for cells in lines] == ["64"] * 4
    assert [cells[4] for cells in lines] == ["14.00 GB", "9.00 GB", "9.00 GB", "9.00 GB"]
    assert [cells[6] for cells in lines] == ["no", "yes", "yes", "yes"]
    assert [cells[7] for cells in lines] == ["40", "100", "0", ""]
    assert table.count('class="misfit"') == 1


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


def test_bars_of_kinds_follow_one_another_and_add_up_to_scale() -> None:
    row = planned_row("V100-16GB", kinds={"gradients": 2_000_000_000, "parameters": 6_000_000_000})
    figure = memory_picture([row])
    (first, first_width), (second, second_width) = starts_and_widths(figure)
    assert second == pytest.approx(first + first_width, abs=0.02)
    assert first_width == pytest.approx(3 * second_width, abs=0.1)  # parameters are first, in every bar
    a_byte = (first_width + second_width) / 8e9
    assert mark(figure, "usable") == [pytest.approx(first + a_byte * row.usable_bytes, abs=0.1)]
    assert mark(figure, "all") == [pytest.approx(first + a_byte * GPUS["V100-16GB"].memory_bytes, abs=0.1)]


def test_all_bars_have_one_scale() -> None:
    figure = memory_picture(ROWS)
    kinds = [len(row.bytes_by_kind) for row in ROWS]
    widths = [width for _, width in starts_and_widths(figure)]
    totals = [sum(widths[sum(kinds[:i]) : sum(kinds[: i + 1])]) for i in range(len(kinds))]
    assert totals == pytest.approx([totals[0] * row.peak_bytes / ROWS[0].peak_bytes for row in ROWS], abs=0.1)
    assert "14.00 GB of 12.43 GB" in [e.text for e in drawn(figure).iter("text") if e.get("class") == "misfit"]


def test_marks_far_beyond_the_bars_are_left_out_and_the_page_says_so() -> None:
    small = planned_row("H100-80GB", kinds={"parameters": 1_000_000_000})
    figure = memory_picture([small])
    assert not mark(figure, "usable")
    assert not mark(figure, "all")
    ((_, width),) = starts_and_widths(figure)
    assert width == pytest.approx(630 / 3, abs=0.1)
    assert "are left out" in page([small])
    assert "are left out" not in page([planned_row("V100-16GB", kinds=LARGE)])


def test_an_unknown_kind_has_a_color_of_its_own() -> None:
    rects = parts(memory_picture([ROWS[0]]), "rect", "kind14")
    assert len(rects) == 1
    assert ".kind14 { color:" in page(ROWS)
    assert ".kind15 {" not in page(ROWS)


def test_the_largest_batches_are_bars_in_the_policies_colors() -> None:
    figure = batch_picture(ROWS)
    (own, mixed) = (parts(figure, "rect", name) for name in ("series0", "series1"))
    assert len(own) == len(mixed) == 1  # none fits on A100s, and for the last row none was searched for
    assert float(mixed[0]["width"]) == pytest.approx(2.5 * float(own[0]["width"]), abs=0.05)
    texts = [e.text for e in drawn(figure).iter("text")]
    assert {"40", "100", "none fits", "V100-16GB", "A100-40GB"} <= set(texts)


def test_pages_of_one_row_without_a_search_and_of_steps_that_do_not_fit() -> None:
    one = page([planned_row()])
    assert Page(one).tags.count("svg") == 2
    assert "Largest batch that fits" not in one
    assert "1 device" not in one.split("</table>")[0]  # placements only where they differ
    misfit = planned_row("V100-16GB", kinds=LARGE, largest=found_batch(0, 40_000_000_000))
    assert summary([misfit]) == "0 of 1 fits."
    assert "none fits" in Page(page([misfit])).text
    assert batch_picture([planned_row()]) == ""


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
    figure = roofline_picture(ROWS[3])
    slope, *roofs = (e["d"] for e in parts(figure, "path", "roof"))
    (x1, y1), (x2, y2), (x3, y3) = (map(float, d[1:].split("H")[0].split()) for d in roofs)
    assert slope.split("L")[1] == roofs[-1][1:].split("H")[0]  # the slope ends where the highest roof starts
    expected = pytest.approx(math.log(156 / 19.5) / math.log(312 / 156), rel=0.02)
    assert (y1 - y2) / (y2 - y3) == expected
    assert (x2 - x1) / (x3 - x2) == expected
    large, small = parts(figure, "circle", "kernel")
    assert float(large["cy"]) == pytest.approx(y3, abs=0.1)
    (step,) = parts(figure, "circle", "step")
    assert float(small["cx"]) < float(step["cx"]) < float(large["cx"])
    assert float(step["cy"]) > float(large["cy"])


def test_dtypes_of_equal_rates_share_a_roof_and_unused_ones_have_none() -> None:
    figure = roofline_picture(ROWS[2])
    labels = [e.text or "" for e in drawn(figure).iter("text") if ": " in (e.text or "")]
    assert labels == ["float32: 19.5 Tflop/s", "tfloat32: 156 Tflop/s", "bfloat16, float16: 312 Tflop/s"]


def test_roofs_start_within_the_picture_whatever_the_points_are() -> None:
    for row in ROWS:
        figure = roofline_picture(row)
        starts = [float(e["d"][1:].split()[0]) for e in parts(figure, "path", "roof")]
        assert min(starts) >= 70


def test_kernels_that_are_alike_count_together() -> None:
    costs = ROWS[1].costs
    large = max(costs.kernels, key=lambda kernel: kernel.seconds)
    again = dataclasses.replace(large, name="again", times=3)
    found = costliest_first(dataclasses.replace(costs, kernels=(*costs.kernels, again)))
    assert (found[0].operation, found[0].times) == ("<dense>/dot_general", 4)
    assert found[0].all_seconds == pytest.approx(4 * large.seconds_without_cache)
    assert len(found) == len(costliest_first(costs))
    assert [kernels.all_seconds for kernels in found] == sorted((k.all_seconds for k in found), reverse=True)
