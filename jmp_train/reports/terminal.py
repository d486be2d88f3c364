"""Text that fits the terminal: wide tables become lines, and lines break between fields."""

import os
import re
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from jmp_train.extras import extra_packages
from jmp_train.policies.documents import Table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

_UNLIMITED = 10_000  # for files and pipes, which have no width
_INDENT = "  "


def console_on(stream: IO[str]) -> "Console":
    """Returns rich's console on a stream, without styles if NO_COLOR is set or the stream is not a terminal.

    Args:
      stream: the stream to print to.
    """
    with extra_packages():
        from rich.console import Console

    plain = bool(os.environ.get("NO_COLOR"))
    return Console(
        file=stream,
        no_color=plain,
        color_system=None if plain else "auto",
        width=width_of(stream),
    )


def is_screen(stream: IO[str]) -> bool:
    """Returns True if a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def width_of(stream: IO[str]) -> int:
    """Returns the width of a stream's lines: COLUMNS, the terminal's width, or a large number for files.

    Args:
      stream: a terminal, a pipe or a file.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns) > 0:
        return int(columns)
    if not stream.isatty():
        return _UNLIMITED
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def wrapped(text: str, width: int) -> str:
    """Returns a text of fields in lines of at most `width`, broken between fields if possible.

    Args:
      text: fields separated by two or more spaces, with single spaces within. Longer words stay whole.
      width: maximum width of a line.

    Example:
      >>> print(wrapped("float32  loss 0.5  learning rate 1.00e-03  0.25 s", 26))
      float32  loss 0.5
        learning rate 1.00e-03
        0.25 s
    """
    if len(text) <= width:
        return text
    lines = [""]
    for gap, field in re.findall("( *)((?:[^ ]| (?! ))+)", text.strip()):
        parts = [field] if len(field) <= width - len(_INDENT) else field.split(" ")
        for part in parts:
            gap = gap if part is parts[0] else " "
            if not lines[-1]:
                lines[-1] = part
            elif len(lines[-1] + gap + part) <= width:
                lines[-1] += gap + part
            else:
                lines.append(_INDENT + part)
    return "\n".join(lines)


class Sheet:
    """A table for rich to print; if it is too wide, each row is its first cell and lines of the other cells.

    Args:
      table: the table.
    """

    def __init__(self, table: Table) -> None:
        self.table = table
        self.rows = table.plain_rows

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[RenderableType]":
        """Yields a table or, if it does not fit, lines."""
        columns = zip(self.table.heads, *self.rows, strict=True)
        needed = 1 + sum(1 + max(map(len, column)) for column in columns)
        if needed <= options.max_width:
            yield self._table()
        else:
            yield from self._lines(options.max_width)

    def _table(self) -> "RenderableType":
        with extra_packages():
            from rich import box
            from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, padding=0, caption=self.table.note or None)
        for number, title in enumerate(self.table.heads):
            table.add_column(title, justify="left" if number in self.table.texts else "right", no_wrap=True)
        for row in self.rows:
            table.add_row(*row)
        return table

    def _lines(self, width: int) -> "Iterator[RenderableType]":
        with extra_packages():
            from rich.text import Text

        for name, *cells in self.rows:
            pairs = zip(self.table.heads[1:], cells, strict=True)
            fields = [f"{title} {cell}" for title, cell in pairs if cell]
            yield Text(name)
            for line in wrapped("  ".join(fields), width - len(_INDENT)).splitlines():
                yield Text(_INDENT + line.strip())
        if self.table.note:
            yield Text(self.table.note)
