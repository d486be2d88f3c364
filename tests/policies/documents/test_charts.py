"""Charts: marks are where their values are, in SVG as in pixels, on linear and logarithmic axes."""

import itertools
from xml.etree import ElementTree

import pytest

from jmp_train.policies.documents import (
    Axis,
    Box,
    Chart,
    Dot,
    Label,
    Mark,
    Path,
    Row,
    Style,
    bar_chart,
    log_axis,
    placed,
    series_styles,
    svg,
    svg_file,
)

pytestmark = pytest.mark.quick

LINEAR, LOG = Axis(0, 10, [(0, "0"), (10, "10")]), Axis(1e-3, 1e3, [(1, "1")], is_log=True)
STYLES = {"a": Style("first", "first of all"), "b c": Style(("#000000", "#ffffff"), dash="2 1", opacity=0.5)}


def chart(*marks: Mark, legend: str = "first of all") -> Chart:
    """Returns a chart of 100 x 200 pixels between its axes, from (10, 20) on."""
    styles = {**STYLES, "a": Style("first", legend)}
    return Chart("c", "a chart", LINEAR, LOG, styles, marks, size=(120, 240), margins=(10, 10, 20, 20))


def marks_of(made: Chart, kind: type[Mark]) -> list[Mark]:
    """Returns the marks of a chart in pixels, without grid, labels and legend."""
    return [m for m in placed(made, has_legend=False)[0] if isinstance(m, kind) and m.style in made.styles]


def test_values_become_pixels_and_what_a_logarithmic_axis_lacks_is_at_its_end() -> None:
    (path,) = marks_of(chart(Path("a", [[(0, 1), (5, 0), (10, 1e9)]])), Path)
    assert isinstance(path, Path)
    assert path.runs == [[(10, 120), (60, 220), (110, 20)]]
    (box,) = marks_of(chart(Box("a", 2, 4, 1e-3, 1)), Box)
    assert box == Box("a", 30, 50, 220, 120)
    (label,) = marks_of(chart(Label("here", 5, 1, shift=(3, 4), style="a")), Label)
    assert label == Label("here", 63, 124, style="a")


def test_dots_with_text_do_not_cover_each_other_and_others_stay() -> None:
    dots = [Dot("a", 5, 1e3, 8, text=str(i)) for i in range(9)] + [Dot("a", 5, 1e3)] * 2
    *numbered, one, other = marks_of(chart(*dots), Dot)
    assert one == other == Dot("a", 60, 20)
    for (i, a), (j, b) in itertools.combinations(enumerate(numbered), 2):
        assert isinstance(a, Dot)
        assert isinstance(b, Dot)
        assert abs(a.y - b.y) >= 16, (i, j)
        assert a.y < b.y <= 220


def test_a_cross_is_two_lines() -> None:
    (path,) = marks_of(chart(Dot("a", 5, 1, is_cross=True)), Path)
    assert isinstance(path, Path)
    assert path.runs == [[(56, 116), (64, 124)], [(56, 124), (64, 116)]]


def test_the_shortest_dash_is_seen() -> None:
    (path,) = marks_of(chart(Path("a", [[(5, 1), (5.001, 1)], [(5, 1), (7, 1)]])), Path)
    assert isinstance(path, Path)
    assert path.runs == [[(60, 120), (61.5, 120)], [(60, 120), (80, 120)]]


def test_a_legend_takes_rows_from_the_top_and_wraps() -> None:
    plain, height = placed(chart(Path("a", [[(0, 1), (1, 1)]])), has_legend=False)
    marks, taller = placed(chart(Path("a", [[(0, 1), (1, 1)]])))
    assert (height, taller) == (240, 258)
    keys = [mark for mark in marks if isinstance(mark, Path) and mark.width == 4]
    assert [key.style for key in keys] == ["a"]
    assert len(marks) == len(plain) + 2
    _, styles = series_styles([f"policy {i}" for i in range(5)])
    many = Chart("c", "", LINEAR, LOG, styles, [], size=(300, 240))
    assert placed(many)[1] == 240 + 3 * 18  # two fit side by side


def test_svg_is_well_formed_with_a_class_a_color_and_a_title_per_mark() -> None:
    made = svg(chart(Path("b c", [[(0, 1), (10, 1)]], "a < b"), Dot("a", 1, 1, title="here", text="1", link="#x")))
    root = ElementTree.fromstring(made)
    (path,) = [part for part in root.iter("path") if part.get("class") == "b c"]
    assert (path.get("d"), path.findtext("title")) == ("M10 138H110", "a < b")
    (link,) = root.iter("a")
    assert (link.get("href"), link.findtext("circle/title"), link.findtext("text")) == ("#x", "here", "1")
    rules = root.findtext("style", "")
    assert "#c .b.c { color: light-dark(#000000, #ffffff); stroke-dasharray: 2 1; opacity: 0.5; }" in rules


def test_a_file_has_charts_below_each_other_in_light_colors() -> None:
    made = svg_file([chart(legend=""), chart(legend="")], "two <charts>")
    root = ElementTree.fromstring(made)
    assert (root.get("height"), root.get("aria-label")) == ("480", "two <charts>")
    space = "{http://www.w3.org/2000/svg}"
    assert [part.get("y") for part in root.iter(f"{space}svg")] == [None, "0", "240"]
    assert "light-dark" not in made
    assert "$" not in made


def test_bars_begin_where_the_last_one_ends_and_texts_are_next_to_them() -> None:
    rows = [
        Row("first", [("a", 2, ""), ("b", 3, "")], "5"),
        Row("second", [("b", 10, "")], "10", marks=[("a", 11, "")]),
    ]
    made = bar_chart("bars", "", {"group": rows}, LINEAR, STYLES, width=600, sides=(100, 100))
    marks, height = placed(made, has_legend=False)
    assert height == 22 + 2 * 22 + 6 + 24
    boxes = [mark for mark in marks if isinstance(mark, Box)]
    assert [(box.left, box.right) for box in boxes] == [(100, 180), (180, 300), (100, 500)]
    assert [box.bottom - box.top for box in boxes] == pytest.approx([14.08] * 3)
    labels = {mark.text: (mark.x, mark.anchor) for mark in marks if isinstance(mark, Label)}
    assert labels["5"] == (306, "start")
    assert labels["second"] == (92, "end")
    assert labels["group"] == (0, "start")
    assert not [mark for mark in marks if isinstance(mark, Path) and mark.style == "a"]  # beyond the axis


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
