"""Renders documents as HTML and charts as SVG, without scripts or network, for light and dark surroundings."""

import functools
import pathlib
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from jmp_train.policies.documents.charts import Box, Chart, Color, Dot, Label, Mark, Path, light_and_dark
from jmp_train.policies.documents.elements import Block, shown
from jmp_train.policies.documents.layout import placed

_FONT = 'font-family="system-ui, sans-serif" font-size="11"'

Paint = Callable[[Color], str]
"""Returns the CSS of a color."""


def page(title: str, blocks: Sequence[Block | None], footer: Sequence[str] = ()) -> str:
    """Returns a whole page.

    Args:
      title: the heading.
      blocks: the content; None is skipped.
      footer: small texts at the end.

    Example:
      >>> from jmp_train.policies.documents.elements import Text
      >>> "<p>1 &lt; 2</p>" in page("Numbers", [Text("1 < 2")])
      True
    """
    return f"{_macros().page(title, blocks, footer)}".strip()


def fragment(blocks: Sequence[Block | None]) -> str:
    """Returns blocks as HTML without a page around it, for notebooks."""
    return f"{_macros().blocks(blocks)}".strip()


def svg(chart: Chart, *, is_whole: bool = True) -> str:
    """Returns a chart as an element of a page. If `is_whole` is False, the page shows title and legend itself."""
    return _svg(chart, is_whole, _themed)


def svg_file(charts: Sequence[Chart]) -> str:
    """Returns the content of an SVG file: charts below each other, in light colors."""
    parts, height = [], 0.0
    for chart in charts:
        chart_height = placed(chart)[1]
        place = f'y="{height:g}" width="{chart.size[0]:g}" height="{chart_height:g}" '
        parts.append(_svg(chart, True, lambda color: light_and_dark(color)[0], place))
        height += chart_height
    width = max(chart.size[0] for chart in charts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" aria-label="{escape("; ".join(chart.title for chart in charts))}">\n'
        f'<rect width="{width:g}" height="{height:g}" fill="#fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


@functools.cache
def _macros() -> Any:
    """Returns the macros of the template."""
    from jinja2 import Environment, StrictUndefined

    made = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    made.filters |= {"shown": shown, "kind": lambda block: type(block).__name__, "svg": svg, "css": _themed}
    return made.from_string(pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")).module


def _themed(color: Color) -> str:
    light, dark = light_and_dark(color)
    return light if light == dark else f"light-dark({light}, {dark})"


def _svg(chart: Chart, is_whole: bool, paint: Paint, place: str = "") -> str:
    marks, height = placed(chart, is_whole=is_whole)
    drawn = "\n".join(filter(None, (_mark(mark, paint) for mark in marks)))
    return (
        f'<svg {place}viewBox="0 0 {chart.size[0]:g} {height:g}" {_FONT} role="img" '
        f'aria-label="{escape(chart.title)}">\n{drawn}\n</svg>'
    )


def _mark(mark: Mark, paint: Paint) -> str:
    match mark:
        case Label(text, x, y, anchor, _, color, is_heading):
            css = f"fill: {paint(color)}" + ("; font-size: 13px" if is_heading else "")
            places = {"x": _pixel(x), "y": _pixel(y), "text-anchor": anchor}
            return _element("text", css, places, text=text) if text else ""
        case Path(style, runs, title):
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
            return f'<a href="{escape(link)}">{drawn}</a>' if link else drawn


def _element(tag: str, css: str, attributes: dict[str, str], title: str = "", text: str = "") -> str:
    written = " ".join(f'{name}="{escape(value)}"' for name, value in {**attributes, "style": css}.items())
    inside = f"<title>{escape(title)}</title>" if title else escape(text)
    return f"<{tag} {written}>{inside}</{tag}>" if inside else f"<{tag} {written}/>"


def _line(run: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{_pixel(x)} {_pixel(y)}" for x, y in run)


def _pixel(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
