"""Charts as SVG, in the colors of the page around them or as files of their own."""

from collections.abc import Mapping, Sequence
from html import escape

from jmp_train.policies.documents.charts import PALETTE, Box, Chart, Color, Dot, Label, Mark, Path, Points, Style
from jmp_train.policies.documents.layout import placed

MARK_STYLE = """\
svg rect, svg circle { fill: currentColor; }
svg path { stroke: currentColor; fill: none; }
svg .grid { stroke: $rule; }
svg text { fill: $soft; }
svg text[class] { fill: currentColor; }
svg .title { color: $ink; font-size: 13px; }"""
"""CSS that all charts share; names of colors follow a dollar sign."""


def svg(chart: Chart, *, has_legend: bool = True) -> str:
    """Returns a chart as an element of a page, in light or dark colors as the page has.

    Args:
      chart: the chart.
      has_legend: whether the legend is part of it.
    """
    marks, height = placed(chart, has_legend=has_legend)
    size = f'viewBox="0 0 {chart.size[0]:g} {height:g}"'
    style = _styles(chart.styles, f"#{chart.name} ", themed=True)
    return (
        f'<svg id="{escape(chart.name)}" {size} role="img" aria-label="{escape(chart.label)}">\n'
        f"<style>{style}</style>\n{_drawn(marks, chart.styles)}\n</svg>"
    )


def svg_file(charts: Sequence[Chart], label: str) -> str:
    """Returns charts below each other as a file of its own, in light colors.

    Args:
      charts: at least one.
      label: what they show, in words.
    """
    parts, height = [], 0.0
    styles: dict[str, Style] = {}
    for chart in charts:
        marks, below = placed(chart)
        parts.append(f'<g transform="translate(0 {height:g})">\n{_drawn(marks, chart.styles)}\n</g>')
        height += below
        styles |= chart.styles
    width = max(chart.size[0] for chart in charts)
    size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
    style = f"{with_colors(MARK_STYLE, themed=False)} {_styles(styles, '', themed=False)}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="system-ui, sans-serif" font-size="11" role="img" '
        f'aria-label="{escape(label)}">\n<style>{style}</style>\n'
        f'<rect width="{width:g}" height="{height:g}" style="fill: #fff"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def with_colors(css: str, themed: bool) -> str:
    """Returns CSS with the palette's colors in place of their names after dollar signs.

    Args:
      css: the text.
      themed: whether the colors follow the surroundings, light or dark; light ones otherwise.

    Example:
      >>> with_colors("p { color: $soft; }", themed=False)
      'p { color: #5f6368; }'
    """
    for name in PALETTE:
        css = css.replace(f"${name};", f"{themed_color(name, themed)};")
    return css


def themed_color(color: Color, themed: bool = True) -> str:
    """Returns the CSS of a color.

    Args:
      color: the color.
      themed: whether it follows the surroundings, light or dark; the light one otherwise.
    """
    light, dark = PALETTE[color] if isinstance(color, str) else color
    return f"light-dark({light}, {dark})" if themed and light != dark else light


def _styles(styles: Mapping[str, Style], scope: str, themed: bool) -> str:
    """Returns the CSS of a chart's styles, of what is within `scope`."""
    rules = []
    for name, style in styles.items():
        entries = {"color": themed_color(style.color, themed)}
        if style.dash:
            entries["stroke-dasharray"] = style.dash
        if style.opacity != 1:
            entries["opacity"] = f"{style.opacity:g}"
        if style.is_hollow:
            entries |= {"fill": themed_color("paper", themed), "stroke": "currentColor", "stroke-width": "2"}
        selector = f"{scope}.{name.replace(' ', '.')}"
        rules.append(f"{selector} {{ {' '.join(f'{key}: {value};' for key, value in entries.items())} }}")
    return "\n".join(rules)


def _drawn(marks: Sequence[Mark], styles: Mapping[str, Style]) -> str:
    return "\n".join(filter(None, (_mark(mark, styles) for mark in marks)))


def _mark(mark: Mark, styles: Mapping[str, Style]) -> str:
    match mark:
        case Path(style, runs, title, width):
            data = "".join(map(_line, runs))
            width = width or (styles[style].width if style in styles else 1)
            return _element("path", style, {"stroke-width": f"{width:g}", "d": data}, title) if data else ""
        case Box(style, left, right, bottom, top, title):
            places = {"x": left, "y": top, "width": right - left, "height": bottom - top}
            return _element("rect", style, {name: str(round(x, 2)) for name, x in places.items()}, title)
        case Label(text, x, y, anchor, _, style):
            places = {"x": _pixel(x), "y": _pixel(y), "text-anchor": anchor}
            return _element("text", style, places, text=text)
        case Dot(style, x, y, radius, title, text, link):
            places = {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": f"{radius:.1f}"}
            drawn = _element("circle", style, places, title)
            drawn += _mark(Label(text, x, y + 4, "middle"), styles) if text else ""
            return f'<a href="{escape(link)}">{drawn}</a>' if link else drawn


def _element(tag: str, style: str, attributes: Mapping[str, str], title: str = "", text: str = "") -> str:
    named = {"class": style, **attributes} if style else attributes
    written = " ".join(f'{name}="{escape(value)}"' for name, value in named.items())
    inside = f"<title>{escape(title)}</title>" if title else escape(text)
    return f"<{tag} {written}>{inside}</{tag}>" if inside else f"<{tag} {written}/>"


def _line(run: Points) -> str:
    """Returns the path through points; lines along an axis need one number each."""
    if len(run) < 2:
        return ""
    (x, y), *rest = ((_pixel(x), _pixel(y)) for x, y in run)
    data = f"M{x} {y}"
    for new_x, new_y in rest:
        data += f"H{new_x}" if new_y == y else f"V{new_y}" if new_x == x else f"L{new_x} {new_y}"
        x, y = new_x, new_y
    return data


def _pixel(x: float) -> str:
    return f"{x:.1f}".removesuffix(".0")
