"""Charts as plain data: two axes, named styles, and marks in the units of the axes."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

Color = str | tuple[str, str]
"""A name of `PALETTE`, or the color in light and in dark surroundings."""

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


@dataclasses.dataclass(frozen=True)
class Axis:
    """The scale of one direction.

    Attributes:
      low: the value at the left or at the bottom.
      high: the value at the right or at the top.
      ticks: values with their labels.
      title: below the labels; only the horizontal axis shows one.
      is_log: whether the scale is logarithmic. Values outside of such an axis, as 0 is, are drawn at its end.
      has_grid: whether a line crosses the chart at each tick.
    """

    low: float
    high: float
    ticks: Sequence[tuple[float, str]] = ()
    title: str = ""
    is_log: bool = False
    has_grid: bool = True


@dataclasses.dataclass(frozen=True)
class Style:
    """The look of all marks that name this style.

    Attributes:
      color: of lines, dots and boxes.
      legend: what the color means; the legend leaves out styles without it.
      width: of lines.
      dash: lengths of dashes and gaps, as in SVG; a solid line if empty.
      opacity: 0 to 1.
      is_hollow: whether dots have the color of the paper inside.
    """

    color: Color = "soft"
    legend: str = ""
    width: float = 2
    dash: str = ""
    opacity: float = 1
    is_hollow: bool = False


# Of all marks: `style` is a name of `Chart.styles`, `title` what a browser shows where the mouse is.


@dataclasses.dataclass(frozen=True)
class Path:
    """Lines through points; `width` if it is not the style's."""

    style: str
    runs: Sequence[Sequence[tuple[float, float]]]
    title: str = ""
    width: float = 0


@dataclasses.dataclass(frozen=True)
class Box:
    """A rectangle, such as a bar."""

    style: str
    left: float
    right: float
    bottom: float
    top: float
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Dot:
    """A circle or a cross with a radius in pixels; `link` is where a click leads.

    One with text inside gives way downwards to others that were drawn before.
    """

    style: str
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
    style: str = ""


Mark = Path | Box | Dot | Label


@dataclasses.dataclass(frozen=True)
class Chart:
    """One chart.

    Attributes:
      name: its id.
      label: what it shows, for those who cannot see it.
      x: the horizontal axis.
      y: the vertical axis.
      styles: by name, which is also the class of the marks in SVG.
      marks: later ones are drawn above earlier ones.
      title: above the chart.
      size: width and height in pixels, without title and legend.
      margins: pixels left, right, above and below the axes.
    """

    name: str
    label: str
    x: Axis
    y: Axis
    styles: Mapping[str, Style]
    marks: Sequence[Mark]
    title: str = ""
    size: tuple[float, float] = (1000, 282)
    margins: tuple[float, float, float, float] = (60, 25, 12, 45)


def series_color(number: int) -> tuple[str, str]:
    """Returns the color of the series with this number, from 0."""
    color = _BRIGHT[number % len(_BRIGHT)]
    return color, color


def series_styles(names: Iterable[str]) -> tuple[dict[str, str], dict[str, Style]]:
    """Returns the style name of each different name, and these styles with the names as legends.

    Example:
      >>> series_styles(["float32", "mixed_float16", "float32"])[0]
      {'float32': 'series0', 'mixed_float16': 'series1'}
    """
    series = {name: f"series{number}" for number, name in enumerate(dict.fromkeys(names))}
    styles = {key: Style(series_color(i), legend=name) for i, (name, key) in enumerate(series.items())}
    return series, styles
