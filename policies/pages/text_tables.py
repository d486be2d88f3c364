"""Tables of plain text."""

from collections.abc import Sequence


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table whose columns start below each other.

    Args:
      rows: cells, equally many in each; the first row is the head.

    Example:
      >>> aligned([("operation", "in"), ("mul", "f32")])
      ['operation  in', 'mul        f32']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
