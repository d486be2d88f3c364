"""Charts as plain data: two axes, and marks in their units. Makes curves, dashes and bar charts."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

Color = str | tuple[str, str]
"""A name of `PALETTE`, or a color for light and one for dark surroundings."""

PALETTE: Mapping[str, tuple[str, str]] = {
    "ink": ("#202124", "#e8eaed"),
    "soft": ("#5f6368", "#9aa0a6"),
    "paper": ("#ffffff", "#18191b"),
    "rule": ("#dadce0", "#3c4043"),
    "shade": ("#f1f3f4", "#26282b"),
    "tint": ("#e8f0fe", "#1f2a3d"),
    "bad": ("#d93025", "#f28b82"),
    "first": ("#1a73e8", "#8ab4f8"),
    "second": ("#e8710a", "#fcad70"),
}

# Paul Tol's "bright" scheme: the color-blind can tell these apart, on white and on black.
_BRIGHT = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")

_HEADING = 22  # pixels of the heading of a group of bars
_CHARACTER = 6.2  # mean width in pixels


@dataclasses.dataclass(frozen=True)
class Axis:
    """The scale of one direction.

    Attributes:
      low: the value at the left or at the bottom.
      high: the value at the right or at the top.
      ticks: values and their labels.
      title: below the labels; only the horizontal axis shows one.
      is_log: True for a logarithmic scale. Values beyond the ends of such an axis, such as 0, are drawn at its ends.
      has_grid: True if a line crosses the chart at each tick.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    title: str = ""
    is_log: bool = False
    has_grid: bool = True

    def part(self, value: float) -> float:
        """Returns the position of a value: 0 at the lower end, 1 at the upper end.

        Example:
          >>> Axis(0, 10).part(5), Axis(0.01, 100, is_log=True).part(1), Axis(0.01, 100, is_log=True).part(0)
          (0.5, 0.5, 0.0)
        """
        if not self.is_log:
            return (value - self.low) / (self.high - self.low)
        return math.log(min(max(value, self.low), self.high) / self.low) / math.log(self.high / self.low)


@dataclasses.dataclass(frozen=True)
class Style:
    """The look of marks.

    Attributes:
      color: color of lines, dots and boxes.
      legend: meaning of the color; the legend leaves out styles without it.
      width: of lines.
      dash: lengths of dashes and gaps, as in SVG; a solid line if empty.
      opacity: 0 to 1.
      is_hollow: True if dots have the color of the paper inside.
    """

    color: Color = "soft"
    legend: str = ""
    width: float = 2
    dash: str = ""
    opacity: float = 1
    is_hollow: bool = False


# The `title` of a mark is the tooltip that browsers show.


@dataclasses.dataclass(frozen=True)
class Polyline:
    """Lines through points; those of one point are not drawn."""

    style: Style
    runs: Sequence[Sequence[tuple[float, float]]]
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle, such as a bar."""

    style: Style
    left: float
    right: float
    bottom: float
    top: float
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Dot:
    """A circle or a cross with a radius in pixels; `link` is the target of a click.

    A dot with text is moved down if it would cover an earlier one.
    """

    style: Style
    x: float
    y: float
    radius: float = 4
    title: str = ""
    text: str = ""
    link: str = ""
    is_cross: bool = False


@dataclasses.dataclass(frozen=True)
class Label:
    """A line of text, whose `anchor`, "start", "middle" or "end", is `shift` pixels right of and below a point."""

    text: str
    x: float
    y: float
    anchor: str = "start"
    shift: tuple[float, float] = (0, 0)
    color: Color = "soft"
    is_heading: bool = False


Mark = Polyline | Box | Dot | Label


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
      title: title of the chart.
      x: the horizontal axis.
      y: the vertical axis.
      marks: the marks; later ones are drawn over earlier ones.
      size: width and height in pixels, without title and legend.
      margins: pixels left, right, above and below the axes.
      note: text below the chart on a page.
    """

    title: str
    x: Axis
    y: Axis
    marks: Sequence[Mark]
    size: tuple[float, float] = (1000, 282)
    margins: tuple[float, float, float, float] = (60, 25, 12, 45)
    note: str = ""

    @property
    def legend(self) -> list[Style]:
        """The styles with a legend, in the order of the marks."""
        styles = dict.fromkeys(mark.style for mark in self.marks if not isinstance(mark, Label))
        return [style for style in styles if style.legend]


def light_and_dark(color: Color) -> tuple[str, str]:
    """Returns the color in light and in dark surroundings."""
    return PALETTE[color] if isinstance(color, str) else color


def series_styles(names: Iterable[str], dashes: Sequence[str] = ("",)) -> dict[str, Style]:
    """Returns a style for each different name, with the name as its legend; the dashes take turns.

    Example:
      >>> [style.color[0] for style in series_styles(["float32", "mixed_float16", "float32"]).values()]
      ['#4477aa', '#ee6677']
    """
    styles = {}
    for number, name in enumerate(dict.fromkeys(names)):
        color = _BRIGHT[number % len(_BRIGHT)]
        styles[name] = Style((color, color), name, dash=dashes[number % len(dashes)])
    return styles


def curve(style: Style, points: Iterable[tuple[float, float]]) -> Polyline:
    """Returns a line through points, with gaps where a value is not finite.

    Example:
      >>> curve(Style(), [(1, 2.0), (2, 1.5), (3, math.nan), (4, 1.0)]).runs
      [[(1, 2.0), (2, 1.5)], [(4, 1.0)]]
    """
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if math.isfinite(y):
            runs[-1].append((x, y))
        else:
            runs.append([])
    return Polyline(style, runs)


def dashes(style: Style, values: Iterable[float]) -> Polyline:
    """Returns a dash per value, from its number to the next one; values that are not positive have none."""
    return Polyline(style, [[(i, value), (i + 1, value)] for i, value in enumerate(values) if value > 0])


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a bar with its length, or a mark across it with its place."""

    style: Style
    value: float
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A bar.

    Attributes:
      label: text to the left of the bar, cut if it is long. A bar without one touches the bar above it.
      pieces: the parts of the bar, from left to right.
      text: text to the right of the bar.
      color: color of the text.
      marks: across the bar; those beyond the end of the axis are left out.
    """

    label: str
    pieces: Sequence[Piece]
    text: str = ""
    color: Color = "soft"
    marks: Sequence[Piece] = ()


def bar_chart(
    title: str,
    groups: Mapping[str, Sequence[Row]],
    axis: Axis,
    *,
    note: str = "",
    width: float = 1000,
    sides: tuple[float, float] = (230, 140),
    pitch: float = 22,
    texts_at_edge: bool = False,
) -> Chart:
    """Returns a chart with a horizontal bar for each row.

    Args:
      title: title of the chart.
      groups: rows by the heading above them, which may be empty.
      axis: the horizontal axis.
      note: text below the chart on a page.
      width: width of the chart in pixels.
      sides: pixels for labels to the left, and for texts to the right.
      pitch: pixels from row to row; a bar takes two thirds of them.
      texts_at_edge: True if texts end at the right edge of the chart, and not next to their bars.
    """
    edge = axis.low - sides[0] * (axis.high - axis.low) / (width - sum(sides))
    longest, baseline = int((sides[0] - 8) / _CHARACTER), 0.32 * pitch + 4
    marks: list[Mark] = []
    top = 0.0
    for heading, rows in groups.items():
        if heading:
            marks.append(Label(heading, edge, top, shift=(0, 14), color="ink", is_heading=True))
            top += _HEADING
        for row in rows:
            top -= 0 if row.label else 0.36 * pitch
            short = row.label if len(row.label) <= longest else f"{row.label[: longest - 1]}…"
            end = axis.low + sum(piece.value for piece in row.pieces)
            x, anchor, shift = (axis.high, "end", sides[1]) if texts_at_edge else (end, "start", 6)
            marks += [
                *_bar(row, axis, top, top + 0.64 * pitch),
                Label(short, axis.low, top, "end", (-8, baseline)),
                Label(row.text, x, top, anchor, (shift, baseline), row.color),
            ]
            top += pitch
    below = 24 if axis.ticks else 4
    downwards = Axis(max(top, 1), 0)  # pixels
    return Chart(title, axis, downwards, marks, (width, top + 6 + below), (*sides, 6, below), note)


def _bar(row: Row, axis: Axis, top: float, bottom: float) -> Iterator[Mark]:
    start = axis.low
    for piece in row.pieces:
        yield Box(piece.style, start, start + piece.value, bottom, top, piece.title)
        start += piece.value
    for mark in row.marks:
        if mark.value <= axis.high:
            yield Polyline(mark.style, [[(mark.value, top - 3), (mark.value, bottom + 3)]], mark.title)


def linear_axis(
    low: float,
    high: float,
    label: Callable[[float], str] = "{:.3g}".format,
    *,
    title: str = "",
    has_grid: bool = True,
    least_step: float = 0,
) -> Axis:
    """Returns a linear axis with ticks at up to seven round numbers.

    Args:
      low: the lower end.
      high: the upper end. If it equals `low`, the axis extends by 1 to both sides.
      label: returns the label of a tick.
      title: the title of the axis.
      has_grid: True if a line crosses the chart at each tick.
      least_step: the minimum distance of ticks, such as 1 for counts.

    Example:
      >>> linear_axis(0, 16.9).ticks
      [(0.0, '0'), (5.0, '5'), (10.0, '10'), (15.0, '15')]
    """
    low, high = (low - 1, high + 1) if low == high else (low, high)
    least = max((high - low) / 6, least_step)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least * (1 - 1e-9))
    numbers = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Axis(low, high, [(i * step, label(i * step)) for i in numbers], title, has_grid=has_grid)


def log_axis(
    values: Iterable[float], label: Callable[[float], str] = "{:.3g}".format, *, base: int = 10, title: str = ""
) -> Axis:
    """Returns a logarithmic axis around positive numbers, with ticks at powers of its base.

    With base 10, it begins and ends at 1, 2 or 5 times a power of ten; these are the ticks if there are no two powers.

    Args:
      values: the values, at least one.
      label: returns the label of a tick.
      base: 10, or 2 for an axis of powers of two.
      title: the title of the axis.

    Example:
      >>> axis = log_axis([0.03, 3.0])
      >>> axis.low, axis.high, axis.ticks
      (0.02, 5.0, [(0.1, '0.1'), (1.0, '1')])
    """
    low, high = min(numbers := list(values)), max(numbers)
    exponents = range(math.floor(math.log(low, base)) - 1, math.ceil(math.log(high, base)) + 2)
    powers = [float(base) ** exponent for exponent in exponents]
    bounds = [factor * power for power in powers for factor in ((1, 2, 5) if base == 10 else (1,))]
    low = max(bound for bound in bounds if bound <= low * (1 + 1e-9))
    high = min(bound for bound in bounds if bound >= high * (1 - 1e-9) and bound > low)
    inside = [power for power in powers if low <= power <= high]
    inside = inside[:: len(inside) // 8 + 1]
    if len(inside) < 2:
        inside = [bound for bound in bounds if low <= bound <= high]
    return Axis(low, high, [(tick, label(tick)) for tick in inside], title, is_log=True)
