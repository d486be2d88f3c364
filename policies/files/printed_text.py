"""Text that is safe to print, and in columns."""

from collections.abc import Sequence


def escaped(text: str, keep: str = "") -> str:
    r"""Returns a text with escapes in place of control characters, halves of surrogate pairs and the like.

    Args:
      text: a text with names of users, which may have any characters.
      keep: control characters that stay.

    Example:
      >>> print(escaped("f1[micro]\x1b[31m\n"))
      f1[micro]\x1b[31m\n
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Returns the lines of a table with aligned columns.

    Args:
      rows: rows of equally many cells; the first one is the head.

    Example:
      >>> aligned([("operation", "in"), ("mul", "f32")])
      ['operation  in', 'mul        f32']
    """
    rows = [[*map(escaped, row)] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
