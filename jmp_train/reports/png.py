"""Draws charts by matplotlib, in light colors, to one PNG."""

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jmp_train.extras import extra_packages
from jmp_train.policies.documents import PALETTE, Box, Chart, Dot, Label, Mark, Path, Style, placed

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_INCHES, _COLUMNS, _DPI = (15.0, 7.5), 3, 120
_FONT = 11  # pixels, as in SVG


def png(charts: Sequence[Chart], title: str, footnote: str) -> bytes:
    """Returns charts in a grid as one PNG of 1800 x 900 pixels.

    Args:
      charts: the charts.
      title: text above the charts.
      footnote: text below the charts, or an empty string.
    """
    with extra_packages():
        from matplotlib.figure import Figure

    figure = Figure(figsize=_INCHES)
    figure.suptitle(title)
    figure.text(0.5, 0.01, footnote, ha="center", fontsize="small", color=PALETTE["soft"][0])
    figure.subplots_adjust(0.02, 0.05, 0.98, 0.92, 0.04, 0.04)
    grid = figure.subplots(-(-len(charts) // _COLUMNS), _COLUMNS, squeeze=False)
    for axes in grid.flat:
        axes.set_axis_off()
    for axes, chart in zip(grid.flat, charts, strict=False):
        _draw(axes, chart)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=_DPI)
    return file.getvalue()


def _draw(axes: "Axes", chart: Chart) -> None:
    marks, height = placed(chart)
    width = chart.size[0]
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.set_aspect("equal", anchor="N")
    room = axes.get_position()
    points = 72 * min(room.width * _INCHES[0] / width, room.height * _INCHES[1] / height)  # per pixel
    styles = {"": Style("soft"), "title": Style("ink"), "grid": Style("rule", width=1), **chart.styles}
    for mark in marks:
        _draw_mark(axes, mark, styles, points)


def _draw_mark(axes: "Axes", mark: Mark, styles: Mapping[str, Style], points: float) -> None:
    style = styles[mark.style]
    color = (PALETTE[style.color] if isinstance(style.color, str) else style.color)[0]
    match mark:
        case Path(_, runs, _, width):
            dash = [float(length) * points for length in style.dash.split()]
            thick = points * (width or style.width)
            line = (0, tuple(length / thick for length in dash)) if dash else "-"
            for run in runs:
                axes.plot(*zip(*run, strict=True), color=color, lw=thick, ls=line, alpha=style.opacity)
        case Box(_, left, right, bottom, top):
            corners = [(left, top), (right, top), (right, bottom), (left, bottom)]
            axes.fill(*zip(*corners, strict=True), color=color, lw=0, alpha=style.opacity)
        case Label(said, x, y, anchor):
            align = {"start": "left", "middle": "center", "end": "right"}[anchor]
            size = _FONT * points * (1.2 if mark.style == "title" else 1)
            axes.text(x, y, said, ha=align, va="baseline", size=size, color=color, parse_math=False)
        case Dot(_, x, y, radius):
            axes.plot([x], [y], "o", color=color, ms=2 * radius * points, alpha=style.opacity)
