"""Text that fits the terminal: wide tables become lines, and lines break between fields."""

import os
import re
import textwrap
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from jmp_train.extras import extra_packages
from jmp_train.policies.documents import Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_UNLIMITED = 10_000  # for files and pipes, which have no width
_INDENT, _NO_BREAK = "  ", "\xa0"


def console_on(stream: IO[str]) -> "Console":
    """Returns rich's console on a stream, without styles if NO_COLOR is set or the stream is not a terminal.

    Args:
      stream: the stream to print to.
    """
    with extra_packages():
        from rich.console import Console

    colors = None if os.environ.get("NO_COLOR") else "auto"
    return Console(file=stream, color_system=colors, width=width_of(stream))


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

    def joined(field: re.Match[str]) -> str:
        return field[0].replace(" ", _NO_BREAK) if len(field[0]) <= width - len(_INDENT) else field[0]

    fields = re.sub(r"[^ ]+(?: [^ ]+)+", joined, text)
    wrapper = textwrap.TextWrapper(width, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False)
    return wrapper.fill(fields).replace(_NO_BREAK, " ")


def sheet(table: Table, width: int) -> "RenderableType":
    """Returns a table for rich to print; if it is too wide, each row is its first cell and lines of the other cells."""
    with extra_packages():
        from rich import box
        from rich.table import Table as RichTable
        from rich.text import Text

    rows = table.plain_rows
    if 1 + sum(1 + max(map(len, column)) for column in zip(table.heads, *rows, strict=True)) > width:
        return Text("\n".join(_lines(table, width)))
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=0, caption=table.note or None)
    for number, title in enumerate(table.heads):
        drawn.add_column(title, justify="left" if number in table.texts else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _lines(table: Table, width: int) -> Iterator[str]:
    for name, *cells in table.plain_rows:
        pairs = zip(table.heads[1:], cells, strict=True)
        fields = [f"{title} {cell}" for title, cell in pairs if cell]
        yield name
        for line in wrapped("  ".join(fields), width - len(_INDENT)).splitlines():
            yield _INDENT + line.strip()
    if table.note:
        yield table.note
