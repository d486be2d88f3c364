"""Charts of horizontal bars: rows with labels, in groups, of one or several pieces each."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from jmp_train.policies.documents.charts import Axis, Box, Chart, Label, Mark, Path, Style

Piece = tuple[str, float, str]
"""A part of a bar or a mark across it: the style, the length or the place, and what a browser shows at the mouse."""

_HEAD = 22  # pixels of a group's name
_CHARACTER = 6.2


@dataclasses.dataclass(frozen=True)
class Row:
    """A bar.

    Attributes:
      label: to the left of the bar, cut if it is long. A bar without one touches the bar above it.
      pieces: from left to right.
      text: to the right of the bar.
      text_style: of the text, a name of `Chart.styles`.
      marks: across the bar; those beyond the end of the axis are left out.
    """

    label: str
    pieces: Sequence[Piece]
    text: str = ""
    text_style: str = ""
    marks: Sequence[Piece] = ()


def bar_chart(
    name: str,
    label: str,
    groups: Mapping[str, Sequence[Row]],
    axis: Axis,
    styles: Mapping[str, Style],
    *,
    title: str = "",
    width: float = 1000,
    sides: tuple[float, float] = (230, 140),
    pitch: float = 22,
    texts_at_edge: bool = False,
) -> Chart:
    """Returns a chart with a bar for each row.

    Args:
      name: the chart's id.
      label: what it shows.
      groups: rows by the heading above them, which may be empty.
      axis: of the lengths.
      styles: of the pieces, marks and texts.
      title: above the chart.
      width: of the chart in pixels.
      sides: pixels for labels to the left, and for texts to the right.
      pitch: pixels from row to row; a bar takes two thirds of them.
      texts_at_edge: whether texts end at the right edge of the chart, and not next to their bars.
    """
    edge = axis.low - sides[0] * (axis.high - axis.low) / (width - sum(sides))
    longest, baseline = int((sides[0] - 8) / _CHARACTER), 0.32 * pitch + 4
    marks: list[Mark] = []
    top = 0.0
    for heading, rows in groups.items():
        if heading:
            marks.append(Label(heading, edge, top, shift=(0, 14), style="title"))
            top += _HEAD
        for row in rows:
            top -= 0 if row.label else 0.36 * pitch
            short = row.label if len(row.label) <= longest else f"{row.label[: longest - 1]}…"
            end = axis.low + sum(length for _, length, _ in row.pieces)
            x, anchor, shift = (axis.high, "end", sides[1]) if texts_at_edge else (end, "start", 6)
            marks += [
                *_bar(row, axis, top, top + 0.64 * pitch),
                Label(short, axis.low, top, "end", (-8, baseline)),
                Label(row.text, x, top, anchor, (shift, baseline), row.text_style),
            ]
            top += pitch
    below = 24 if axis.ticks else 4
    downwards = Axis(max(top, 1), 0)  # pixels
    return Chart(name, label, axis, downwards, styles, marks, title, (width, top + 6 + below), (*sides, 6, below))


def _bar(row: Row, axis: Axis, top: float, bottom: float) -> Iterator[Mark]:
    start = axis.low
    for style, length, title in row.pieces:
        yield Box(style, start, start + length, bottom, top, title)
        start += length
    for style, place, title in row.marks:
        if place <= axis.high:
            yield Path(style, [[(place, top - 3), (place, bottom + 3)]], title)
