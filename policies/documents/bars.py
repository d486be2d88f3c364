"""Charts of horizontal bars: rows with labels, in groups, of one or several pieces each."""

import dataclasses
from collections.abc import Mapping, Sequence

from jmp_train.policies.documents.charts import Axis, Box, Chart, Label, Mark, Path, Style

_HEAD = 22  # pixels of a group's name
_CHARACTER = 6.2


@dataclasses.dataclass(frozen=True)
class Piece:
    """A part of a bar, or a mark across it.

    Attributes:
      style: a name of `Chart.styles`.
      value: the length of the part, or the place of the mark.
      title: what a browser shows where the mouse is.
    """

    style: str
    value: float
    title: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """A bar.

    Attributes:
      label: to the left of the bar, cut if it is long.
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
      name: see `Chart`.
      label: see `Chart`.
      groups: rows by the heading above them, which may be empty.
      axis: of the lengths.
      styles: see `Chart`.
      title: see `Chart`.
      width: of the chart in pixels.
      sides: pixels for labels to the left, and for texts to the right.
      pitch: pixels from row to row; a bar takes two thirds of them.
      texts_at_edge: whether texts end at the right edge of the chart, and not next to their bars.
    """
    marks: list[Mark] = []
    edge = axis.low - sides[0] * (axis.high - axis.low) / (width - sum(sides))
    top = 0.0
    for heading, rows in groups.items():
        if heading:
            marks.append(Label(heading, edge, top, shift=(0, 14), style="title"))
            top += _HEAD
        for row in rows:
            marks += _row(row, axis, top, pitch, int((sides[0] - 8) / _CHARACTER), sides[1] if texts_at_edge else None)
            top += pitch
    below = 24 if axis.ticks else 4
    height = Axis(max(top, 1), 0)  # pixels, downwards
    size, margins = (width, top + 6 + below), (*sides, 6, below)
    return Chart(name, label, axis, height, styles, marks, title, size, margins)


def _row(row: Row, axis: Axis, top: float, pitch: float, longest: int, right: float | None) -> list[Mark]:
    """Returns the marks of a row.

    Args:
      row: the row.
      axis: of the lengths.
      top: its upper edge.
      pitch: the height of a row.
      longest: the most characters of a label.
      right: pixels from the axis to the texts' end; None for texts next to the bar.
    """
    bottom, middle = top + 0.64 * pitch, 0.32 * pitch + 4
    short = row.label if len(row.label) <= longest else f"{row.label[: longest - 1]}…"
    marks: list[Mark] = [Label(short, axis.low, top, "end", (-8, middle))] if short else []
    start = axis.low
    for piece in row.pieces:
        marks.append(Box(piece.style, start, start + piece.value, bottom, top, piece.title))
        start += piece.value
    for piece in row.marks:
        if piece.value <= axis.high:
            marks.append(Path(piece.style, [[(piece.value, top - 3), (piece.value, bottom + 3)]], piece.title))
    if row.text and right is not None:
        marks.append(Label(row.text, axis.high, top, "end", (right, middle), row.text_style))
    elif row.text:
        marks.append(Label(row.text, start, top, "start", (6, middle), row.text_style))
    return marks
