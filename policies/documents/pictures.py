"""Charts as SVG, in the colors of the page around them or as files of their own."""

from collections.abc import Mapping, Sequence
from html import escape

from jmp_train.policies.documents.charts import PALETTE, Box, Chart, Color, Dot, Label, Mark, Path, Style
from jmp_train.policies.documents.layout import placed

MARK_STYLE = """\
svg rect, svg circle { fill: currentColor; }
svg path { stroke: currentColor; fill: none; }
svg .grid { stroke: $rule; }
svg text { fill: $soft; }
svg text[class] { fill: currentColor; }
svg .title { color: $ink; font-size: 13px; }
"""
"""CSS that all charts share; names of colors follow a dollar sign."""


def svg(chart: Chart, *, has_legend: bool = True, is_themed: bool = True, top: float = 0) -> str:
    """Returns a chart as an element of a page.

    Args:
      chart: the chart.
      has_legend: whether the legend is part of it.
      is_themed: whether its colors follow the surroundings, light or dark; light ones otherwise.
      top: where it begins in an SVG around it.
    """
    marks, height = placed(chart, has_legend=has_legend)
    width = chart.size[0]
    around = f'y="{top:g}" width="{width:g}" height="{height:g}" ' if not is_themed else ""
    rules = "\n".join(_rule(chart.name, name, style, is_themed) for name, style in chart.styles.items())
    drawn = "\n".join(filter(None, (_mark(mark, chart.styles) for mark in marks)))
    return (
        f'<svg id="{escape(chart.name)}" {around}viewBox="0 0 {width:g} {height:g}" role="img" '
        f'aria-label="{escape(chart.label)}">\n<style>{rules}</style>\n{drawn}\n</svg>'
    )


def svg_file(charts: Sequence[Chart], label: str) -> str:
    """Returns charts below each other as a file of its own, in light colors; `label` says what they show."""
    parts, height = [], 0.0
    for chart in charts:
        parts.append(svg(chart, is_themed=False, top=height))
        height += placed(chart)[1]
    width = max(chart.size[0] for chart in charts)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="11" role="img" '
        f'aria-label="{escape(label)}">\n<style>{with_colors(MARK_STYLE, is_themed=False)}</style>\n'
        f'<rect width="{width:g}" height="{height:g}" style="fill: #fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def with_colors(css: str, is_themed: bool = True) -> str:
    """Returns CSS with the palette's colors in place of their names after dollar signs.

    Example:
      >>> with_colors("p { color: $soft; }", is_themed=False)
      'p { color: #5f6368; }'
    """
    for name in PALETTE:
        css = css.replace(f"${name};", f"{css_color(name, is_themed)};")
    return css


def css_color(color: Color, is_themed: bool = True) -> str:
    """Returns the CSS of a color, which follows the surroundings, light or dark, or is the light one."""
    light, dark = PALETTE[color] if isinstance(color, str) else color
    return f"light-dark({light}, {dark})" if is_themed and light != dark else light


def _rule(chart: str, name: str, style: Style, is_themed: bool) -> str:
    """Returns the CSS of a style of a chart."""
    entries = {"color": css_color(style.color, is_themed)}
    if style.dash:
        entries["stroke-dasharray"] = style.dash
    if style.opacity != 1:
        entries["opacity"] = f"{style.opacity:g}"
    if style.is_hollow:
        entries |= {"fill": css_color("paper", is_themed), "stroke": "currentColor", "stroke-width": "2"}
    return f"#{chart} .{name.replace(' ', '.')} {{ {' '.join(f'{key}: {value};' for key, value in entries.items())} }}"


def _mark(mark: Mark, styles: Mapping[str, Style]) -> str:
    match mark:
        case Path(style, runs, title, width):
            data = "".join(_line(run) for run in runs if len(run) > 1)
            width = width or (styles[style].width if style in styles else 1)
            return _element("path", style, {"stroke-width": f"{width:g}", "d": data}, title) if data else ""
        case Box(style, left, right, bottom, top, title):
            places = {"x": left, "y": top, "width": right - left, "height": bottom - top}
            return _element("rect", style, {name: str(round(x, 2)) for name, x in places.items()}, title)
        case Label(text, x, y, anchor, _, style):
            places = {"x": _pixel(x), "y": _pixel(y), "text-anchor": anchor}
            return _element("text", style, places, text=text) if text else ""
        case Dot(style, x, y, radius, title, text, link):
            places = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": f"{radius:.1f}"}
            drawn = _element("circle", style, places, title) + _mark(Label(text, x, y + 4, "middle"), styles)
            return f'<a href="{escape(link)}">{drawn}</a>' if link else drawn


def _element(tag: str, style: str, attributes: Mapping[str, str], title: str = "", text: str = "") -> str:
    named = {"class": style, **attributes} if style else attributes
    written = " ".join(f'{name}="{escape(value)}"' for name, value in named.items())
    inside = f"<title>{escape(title)}</title>" if title else escape(text)
    return f"<{tag} {written}>{inside}</{tag}>" if inside else f"<{tag} {written}/>"


def _line(run: Sequence[tuple[float, float]]) -> str:
    """Returns the path through points; lines along an axis need one number each."""
    (x, y), *rest = ((_pixel(x), _pixel(y)) for x, y in run)
    data = f"M{x} {y}"
    for new_x, new_y in rest:
        data += f"H{new_x}" if new_y == y else f"V{new_y}" if new_x == x else f"L{new_x} {new_y}"
        x, y = new_x, new_y
    return data


def _pixel(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
