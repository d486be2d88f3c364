"""Charts: marks are where their values are, in SVG as in pixels, on linear and logarithmic axes."""

import dataclasses
import itertools
import math
from xml.etree import ElementTree

import pytest

from jmp_train.tools.documents import (
    Axis,
    Box,
    Chart,
    Dot,
    Label,
    Mark,
    Piece,
    Polyline,
    Row,
    Style,
    bar_chart,
    curve,
    dashes,
    linear_axis,
    log_axis,
    placed,
    series_styles,
    svg,
    svg_file,
)

pytestmark = pytest.mark.quick

LINEAR, LOG = Axis(0, 10, [(0, "0"), (10, "10")]), Axis(1e-3, 1e3, [(1, "1")], is_log=True)
FIRST, OTHER = Style("first", "first of all"), Style(("#000000", "#ffffff"), dash="2 1")


def chart(*marks: Mark) -> Chart:
    """Returns a chart of 100 x 200 pixels between its axes, from (10, 20) on."""
    return Chart("a chart", LINEAR, LOG, marks, (120, 240), (10, 10, 20, 20))


def marks_of(made: Chart, kind: type[Mark]) -> list[Mark]:
    """Returns the marks of a chart in pixels, without grid and labels of the axes."""
    marks, height = placed(made, is_whole=False)
    assert height == made.size[1]
    return [m for m in marks[-len(made.marks) :] if isinstance(m, kind)]


def test_values_become_pixels_and_what_a_logarithmic_axis_lacks_is_at_its_end() -> None:
    (path,) = marks_of(chart(Polyline(FIRST, [[(0, 1), (5, 0), (10, 1e9)]])), Polyline)
    assert isinstance(path, Polyline)
    assert path.runs == [[(10, 120), (60, 220), (110, 20)]]
    (box,) = marks_of(chart(Box(FIRST, 2, 4, 1e-3, 1)), Box)
    assert box == Box(FIRST, 30, 50, 220, 120)
    (label,) = marks_of(chart(Label("here", 5, 1, shift=(3, 4))), Label)
    assert label == Label("here", 63, 124)


def test_dots_with_text_do_not_cover_each_other_and_others_stay() -> None:
    dots = [Dot(FIRST, 5, 1e3, 8, text=str(i)) for i in range(9)] + [Dot(FIRST, 5, 1e3)] * 2
    *numbered, one, other = marks_of(chart(*dots), Dot)
    assert one == other == Dot(FIRST, 60, 20)
    for (i, a), (j, b) in itertools.combinations(enumerate(numbered), 2):
        assert isinstance(a, Dot)
        assert isinstance(b, Dot)
        assert abs(a.y - b.y) >= 16, (i, j)
        assert a.y < b.y <= 220


def test_a_cross_is_two_lines() -> None:
    (path,) = marks_of(chart(Dot(FIRST, 5, 1, is_cross=True)), Polyline)
    assert isinstance(path, Polyline)
    assert path.runs == [[(56, 116), (64, 124)], [(56, 124), (64, 116)]]


def test_the_shortest_dash_is_seen_and_a_single_point_is_not() -> None:
    (path,) = marks_of(chart(Polyline(FIRST, [[(5, 1), (5.001, 1)], [(5, 1), (7, 1)], [(6, 1)]])), Polyline)
    assert isinstance(path, Polyline)
    assert path.runs == [[(60, 120), (61.5, 120)], [(60, 120), (80, 120)]]


def test_curves_have_gaps_and_dashes_are_of_positive_values() -> None:
    points = [(1, 3.0), (2, math.nan), (3, 1.0), (4, 0.5), (5, math.inf)]
    assert curve(FIRST, points).runs == [[(1, 3.0)], [(3, 1.0), (4, 0.5)], []]
    assert dashes(FIRST, [0.0, 2.0, math.nan, math.inf]).runs == [[(1, 2.0), (2, 2.0)], [(3, math.inf), (4, math.inf)]]


def test_title_and_legend_take_rows_from_the_top_and_the_legend_wraps() -> None:
    lines = [Polyline(style, [[(0, 1), (1, 1)]]) for style in (FIRST, OTHER, FIRST)]
    marks, height = placed(chart(*lines))
    assert height == 240 + 2 * 18
    keys = [mark for mark in marks if isinstance(mark, Polyline) and mark.style.width == 4]
    assert [key.style.legend for key in keys] == ["first of all"]
    headings = [mark.text for mark in marks if isinstance(mark, Label) and mark.is_heading]
    assert headings == ["a chart"]
    styles = series_styles([f"policy {i}" for i in range(5)], ("", "3 2"))
    assert [style.dash for style in styles.values()] == ["", "3 2", "", "3 2", ""]
    assert len({style.color for style in styles.values()}) == 5
    many = Chart("c", LINEAR, LOG, [Polyline(style, [[(0, 1), (1, 1)]]) for style in styles.values()], (300, 240))
    assert placed(many)[1] == 240 + 4 * 18  # two fit side by side


def test_svg_is_well_formed_with_a_color_and_a_title_per_mark() -> None:
    made = svg(
        chart(Polyline(OTHER, [[(0, 1), (10, 1)]], "a < b"), Dot(FIRST, 1, 1, title="here", text="1", link="#x"))
    )
    root = ElementTree.fromstring(made)
    assert root.get("aria-label") == "a chart"
    (path,) = [part for part in root.iter("path") if part.findtext("title")]
    assert path.findtext("title") == "a < b"
    assert path.get("d") == "M10 156L110 156"
    style = "fill: none; stroke: light-dark(#000000, #ffffff); stroke-width: 2; stroke-dasharray: 2 1"
    assert path.get("style") == style
    (link,) = root.iter("a")
    assert (link.get("href"), link.findtext("circle/title"), link.findtext("text")) == ("#x", "here", "1")


def test_a_file_has_charts_below_each_other_in_light_colors() -> None:
    made = svg_file([chart(), dataclasses.replace(chart(), title="a < b")])
    root = ElementTree.fromstring(made)
    assert (root.get("height"), root.get("aria-label")) == ("516", "a chart; a < b")
    space = "{http://www.w3.org/2000/svg}"
    assert [part.get("y") for part in root.iter(f"{space}svg")] == [None, "0", "258"]
    assert "light-dark" not in made


def test_a_file_has_charts_in_rows_between_its_title_and_its_footnote() -> None:
    made = svg_file([chart()] * 5, columns=2, title="a <title>", footnote="& more")
    root = ElementTree.fromstring(made)
    space = "{http://www.w3.org/2000/svg}"
    texts = [part.text for part in root.findall(f"{space}text")]
    assert texts == ["a <title>", "& more"]
    width, height = chart().size[0], placed(chart())[1]
    assert (float(root.get("width", 0)), float(root.get("height", 0))) == (2 * width, 3 * height + 64)
    places = [(float(part.get("x", 0)), float(part.get("y", 0))) for part in root.findall(f"{space}svg")]
    assert places == [(column * width, 32 + row * height) for row, column in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]]


def test_bars_begin_where_the_last_one_ends_and_texts_are_next_to_them() -> None:
    rows = [
        Row("first", [Piece(FIRST, 2), Piece(OTHER, 3)], "5"),
        Row("second", [Piece(OTHER, 10)], "10", marks=[Piece(FIRST, 11)]),
    ]
    made = bar_chart("bars", {"group": rows}, LINEAR, width=600, sides=(100, 100))
    marks, height = placed(made, is_whole=False)
    assert height == 22 + 2 * 22 + 6 + 24
    boxes = [mark for mark in marks if isinstance(mark, Box)]
    assert [(box.left, box.right) for box in boxes] == [(100, 180), (180, 300), (100, 500)]
    assert [box.bottom - box.top for box in boxes] == pytest.approx([14.08] * 3)
    labels = {mark.text: (mark.x, mark.anchor) for mark in marks if isinstance(mark, Label)}
    assert labels["5"] == (306, "start")
    assert labels["second"] == (92, "end")
    assert labels["group"] == (0, "start")
    assert not [mark for mark in marks if isinstance(mark, Polyline) and mark.style == FIRST]  # beyond the axis


@pytest.mark.parametrize("low", [1e-30, 0.031, 1.0, 7.0, 65504.0, 1e30])
@pytest.mark.parametrize("factor", [1.0, 1.3, 30.0, 1e12])
@pytest.mark.parametrize("base", [2, 10])
def test_a_logarithmic_axis_is_around_its_values_and_has_ticks(low: float, factor: float, base: int) -> None:
    axis = log_axis([low * factor, low], base=base)
    assert axis.low <= low * (1 + 1e-6)
    assert axis.high >= low * factor * (1 - 1e-6)
    assert axis.low < axis.high
    assert max(low / axis.low, axis.high / (low * factor)) <= 5.0001
    assert 2 <= len(axis.ticks) <= 9
    assert all(axis.low <= value <= axis.high for value, _ in axis.ticks)


@pytest.mark.parametrize(("low", "high"), [(0.0, 16.9), (-0.31, 0.02), (1.0, 330.0), (0.9, 1.0), (3.0, 3.0)])
@pytest.mark.parametrize("least_step", [0.0, 1.0])
def test_a_linear_axis_has_few_round_ticks_inside(low: float, high: float, least_step: float) -> None:
    axis = linear_axis(low, high, "{:.12g}".format, least_step=least_step)
    assert axis.low <= low <= high <= axis.high
    assert axis.low < axis.high
    ticks = [value for value, _ in axis.ticks]
    assert len(ticks) <= 7
    assert all(axis.low - 1e-9 <= tick <= axis.high + 1e-9 for tick in ticks)
    assert all(len(label.lstrip("-0.").rstrip("0")) <= 3 for _, label in axis.ticks)
    steps = [b - a for a, b in itertools.pairwise(ticks)]
    assert all(step == pytest.approx(steps[0]) and step >= least_step for step in steps)
    assert least_step or len(ticks) >= 3
