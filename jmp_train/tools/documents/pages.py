"""Renders documents as HTML and charts as SVG, without scripts or network, for light and dark surroundings.

Axes have round ticks. A chart's marks, grid, labels, title and legend are placed in pixels, and then drawn.
"""

import dataclasses
import functools
import html
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jmp_train.tools.documents.charts import Box, Chart, Color, Dot, Label, Mark, Polyline, Style, light_and_dark
from jmp_train.tools.documents.elements import Element, escaped, shown

_LINE_HEIGHT = 18  # of the title and of each row of the legend
_CHARACTER = 6.2  # mean width
_SHORTEST = 1.5  # of a dash
_BAND = 32.0  # of the title and of the footnote of a file
_GRID = Style("rule", width=1)

_FONT = 'font-family="system-ui, sans-serif" font-size="11"'

Paint = Callable[[Color], str]
"""Returns the CSS of a color."""


def placed(chart: Chart, *, is_whole: bool = True) -> tuple[list[Mark], float]:
    """Returns all marks of a chart in pixels, y downwards, and the height of the whole.

    Args:
      chart: the chart.
      is_whole: True if title and legend are part of it.

    Example:
      >>> from jmp_train.tools.documents.charts import Axis
      >>> chart = Chart("a line", Axis(0, 1), Axis(0, 1), [Polyline(Style(), [[(0, 0), (1, 1)]])])
      >>> (title, path), height = placed(chart)
      >>> path.runs, height
      ([[(60.0, 255.0), (975.0, 30.0)]], 300)
    """
    width, height = chart.size
    above, marks = 0, []
    if is_whole:
        legend, rows = _legend(chart)
        above, marks = _LINE_HEIGHT * (1 + rows), [Label(chart.title, 0, 14, color="ink", is_heading=True), *legend]
    left, right, top, bottom = chart.margins
    area = _Area(chart, left, width - right, above + top, above + height - bottom)
    return [*marks, *area.axes(), *area.marks()], above + height


def _legend(chart: Chart) -> tuple[list[Mark], int]:
    """Returns the keys of a chart with their texts, and the number of their rows."""
    marks: list[Mark] = []
    left = x = chart.margins[0]
    row = 1
    for style in chart.legend:
        needed = 24 + _CHARACTER * len(style.legend)
        if x > left and x + needed > chart.size[0]:
            x, row = left, row + 1
        y = _LINE_HEIGHT * row
        key = dataclasses.replace(style, width=4)
        marks += [Polyline(key, [[(x, y + 12), (x + 18, y + 12)]]), Label(style.legend, x + 24, y + 16)]
        x += needed + 20
    return marks, row if marks else 0


class _Area:
    """The rectangle between the axes of a chart, in pixels."""

    def __init__(self, chart: Chart, left: float, right: float, top: float, bottom: float) -> None:
        self.chart = chart
        self.left, self.right, self.top, self.bottom = left, right, top, bottom

    def x(self, value: float) -> float:
        return self.left + self.chart.x.part(value) * (self.right - self.left)

    def y(self, value: float) -> float:
        return self.bottom + self.chart.y.part(value) * (self.top - self.bottom)

    def axes(self) -> Iterator[Mark]:
        """Yields the grid and the labels."""
        for value, text in self.chart.y.ticks:
            y = self.y(value)
            yield from [Polyline(_GRID, [[(self.left, y), (self.right, y)]])] * self.chart.y.has_grid
            yield Label(text, self.left - 6, y + 4, "end")
        for value, text in self.chart.x.ticks:
            x = self.x(value)
            yield from [Polyline(_GRID, [[(x, self.top), (x, self.bottom)]])] * self.chart.x.has_grid
            yield Label(text, x, self.bottom + 16, "middle")
        if self.chart.x.title:
            yield Label(self.chart.x.title, (self.left + self.right) / 2, self.bottom + 36, "middle")

    def marks(self) -> Iterator[Mark]:
        """Yields the marks; moves a dot with text down if it would cover an earlier one."""
        texts: list[tuple[float, float]] = []
        for mark in self.chart.marks:
            match mark:
                case Polyline():
                    runs = [_seen([(self.x(x), self.y(y)) for x, y in run]) for run in mark.runs if len(run) > 1]
                    yield dataclasses.replace(mark, runs=runs)
                case Box():
                    edges = {"left": self.x(mark.left), "right": self.x(mark.right)}
                    yield dataclasses.replace(mark, **edges, bottom=self.y(mark.bottom), top=self.y(mark.top))
                case Label():
                    x, y = self.x(mark.x) + mark.shift[0], self.y(mark.y) + mark.shift[1]
                    yield dataclasses.replace(mark, x=x, y=y, shift=(0, 0))
                case Dot():
                    x, y, r = self.x(mark.x), self.y(mark.y), mark.radius
                    if mark.text:
                        y = self._free(x, y, 2 * r, texts)
                        texts.append((x, y))
                    lines = [[(x - r, y - r), (x + r, y + r)], [(x - r, y + r), (x + r, y - r)]]
                    is_cross = mark.is_cross
                    yield Polyline(mark.style, lines, mark.title) if is_cross else dataclasses.replace(mark, x=x, y=y)

    def _free(self, x: float, y: float, size: float, taken: list[tuple[float, float]]) -> float:
        """Returns the first free height for a dot of this size, at `y` or below."""
        while any(abs(x - left) < size and abs(y - top) < size for left, top in taken) and y < self.bottom:
            y += size
        return y


def _seen(run: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the points of a line; lengthens a dash that is too short to be seen."""
    if len(run) == 2 and run[0][1] == run[1][1] and 0 <= run[1][0] - run[0][0] < _SHORTEST:
        return [run[0], (run[0][0] + _SHORTEST, run[0][1])]
    return run


def page(title: str, blocks: Sequence[Element | None], footer: Sequence[str] = ()) -> str:
    """Returns a whole page.

    Args:
      title: the heading.
      blocks: the content; None is skipped.
      footer: small texts at the end.

    Example:
      >>> from jmp_train.tools.documents.elements import Text
      >>> "<p>1 &lt; 2</p>" in page("Numbers", [Text("1 < 2")])
      True
    """
    return f"{_macros().page(title, blocks, footer)}".strip()


def fragment(blocks: Sequence[Element | None]) -> str:
    """Returns blocks as HTML without a page around it, for notebooks."""
    return f"{_macros().blocks(blocks)}".strip()


def svg(chart: Chart, *, is_whole: bool = True) -> str:
    """Returns a chart as an element of a page. If `is_whole` is False, the page shows title and legend itself."""
    return _svg(chart, is_whole, _themed)


def svg_file(charts: Sequence[Chart], *, columns: int = 1, title: str = "", footnote: str = "") -> str:
    """Returns the content of an SVG file: charts in rows, in light colors.

    Args:
      charts: the charts, at least one.
      columns: the number of charts in a row.
      title: text above the charts.
      footnote: text below the charts.
    """
    width = max(chart.size[0] for chart in charts)
    height = _BAND if title else 0.0
    parts = []
    for row in (charts[i : i + columns] for i in range(0, len(charts), columns)):
        heights = [placed(chart)[1] for chart in row]
        for column, (chart, its_height) in enumerate(zip(row, heights, strict=True)):
            place = f'x="{column * width:g}" y="{height:g}" width="{chart.size[0]:g}" height="{its_height:g}" '
            parts.append(_svg(chart, True, _light, place))
        height += max(heights)
    whole = width * min(columns, len(charts))
    texts = [
        Label(title, whole / 2, 20, "middle", color="ink", is_heading=True),
        Label(footnote, whole / 2, height + 16, "middle"),
    ]
    height += _BAND if footnote else 0
    said = _escape("; ".join([*filter(None, [title]), *(chart.title for chart in charts)]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole:g} {height:g}" width="{whole:g}" '
        f'height="{height:g}" {_FONT} role="img" aria-label="{said}">\n'
        f'<rect width="{whole:g}" height="{height:g}" fill="#fff"/>\n'
        + "\n".join([*(_mark(text, _light) for text in texts if text.text), *parts])
        + "\n</svg>\n"
    )


@functools.cache
def _macros() -> Any:
    """Returns the macros of the template."""
    from jinja2 import Environment, StrictUndefined

    options = {"autoescape": True, "trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    made = Environment(**options, finalize=_finalized)
    made.filters |= {"shown": shown, "kind": lambda block: type(block).__name__, "svg": svg, "css": _themed}
    made.filters["lines"] = lambda text: _escape(text, "\n\t")
    return made.from_string(pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")).module


def _finalized(value: Any) -> Any:
    return escaped(value) if type(value) is str else value  # not what is marked as HTML


def _escape(text: str, keep: str = "") -> str:
    return html.escape(escaped(text, keep))


def _light(color: Color) -> str:
    return light_and_dark(color)[0]


def _themed(color: Color) -> str:
    light, dark = light_and_dark(color)
    return light if light == dark else f"light-dark({light}, {dark})"


def _svg(chart: Chart, is_whole: bool, paint: Paint, place: str = "") -> str:
    marks, height = placed(chart, is_whole=is_whole)
    drawn = "\n".join(filter(None, (_mark(mark, paint) for mark in marks)))
    return (
        f'<svg {place}viewBox="0 0 {chart.size[0]:g} {height:g}" {_FONT} role="img" '
        f'aria-label="{_escape(chart.title)}">\n{drawn}\n</svg>'
    )


def _mark(mark: Mark, paint: Paint) -> str:
    match mark:
        case Label(text, x, y, anchor, _, color, is_heading):
            css = f"fill: {paint(color)}" + ("; font-size: 13px" if is_heading else "")
            places = {"x": _pixel(x), "y": _pixel(y), "text-anchor": anchor}
            return _element("text", css, places, text=text) if text else ""
        case Polyline(style, runs, title):
            css = f"fill: none; stroke: {paint(style.color)}; stroke-width: {style.width:g}"
            css += f"; stroke-dasharray: {style.dash}" if style.dash else ""
            return _element("path", css, {"d": "".join(map(_line, runs))}, title) if runs else ""
        case Box(style, left, right, bottom, top, title):
            places = {"x": left, "y": top, "width": right - left, "height": bottom - top}
            css = f"fill: {paint(style.color)}; opacity: {style.opacity:g}"
            return _element("rect", css, {name: str(round(x, 2)) for name, x in places.items()}, title)
        case Dot(style, x, y, radius, title, text, link):
            color = paint(style.color)
            css = f"fill: {paint('paper')}; stroke: {color}; stroke-width: 2" if style.is_hollow else f"fill: {color}"
            places = {"cx": _pixel(x), "cy": _pixel(y), "r": _pixel(radius)}
            drawn = _element("circle", f"{css}; opacity: {style.opacity:g}", places, title)
            drawn += _mark(Label(text, x, y + 4, "middle"), paint)
            return f'<a href="{_escape(link)}">{drawn}</a>' if link else drawn


def _element(tag: str, css: str, attributes: dict[str, str], title: str = "", text: str = "") -> str:
    written = " ".join(f'{name}="{_escape(value)}"' for name, value in {**attributes, "style": css}.items())
    inside = f"<title>{_escape(title)}</title>" if title else _escape(text)
    return f"<{tag} {written}>{inside}</{tag}>" if inside else f"<{tag} {written}/>"


def _line(run: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_pixel(x)} {_pixel(y)}" for x, y in run)


def _pixel(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
