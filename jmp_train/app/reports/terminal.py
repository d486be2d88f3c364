"""Text that fits the terminal: wide tables become lines, and lines break between fields.

Names that users chose are text: nothing in them is markup, an emoji code or a control character.
"""

import contextlib
import functools
import os
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from typing import IO, TYPE_CHECKING

from jmp_train.extras import extra_packages
from jmp_train.policies.files import escaped
from jmp_train.tools.documents import Table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

_UNLIMITED = 10_000  # for files and pipes, which have no width
_NARROWEST = 10  # rich and textwrap fail where nothing fits
_INDENT, _NO_BREAK = "  ", "\xa0"


@contextlib.contextmanager
def showing() -> Iterator[None]:
    """Turns any error in showing results into a warning, because a run is not undone by it. Also a decorator."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - of any kind: the run has ended, or goes on
        _warn_once(f"{type(error).__name__}: {error}")


@functools.cache
def _warn_once(reason: str) -> None:
    print_text(f"jmp-train: warning: not all is shown: {reason}", sys.stderr)


def print_text(text: str, stream: IO[str]) -> None:
    """Prints lines of text, with escapes in place of other control characters.

    Args:
      text: the lines.
      stream: the stream to print to.
    """
    print(escaped(text, "\n"), file=stream, flush=True)


def console_on(stream: IO[str]) -> "Console":
    """Returns the console of all output by rich: it reads no markup or emoji codes, and highlights nothing.

    It has no styles if NO_COLOR is set or the stream is not a terminal.

    Args:
      stream: the stream to print to.
    """
    with extra_packages():
        from rich.console import Console

    colors = None if os.environ.get("NO_COLOR") else "auto"
    width, height = size_of(stream)  # rich fails on some values of COLUMNS and LINES
    return Console(
        file=stream, color_system=colors, width=width, height=height, markup=False, emoji=False, highlight=False
    )


def is_screen(stream: IO[str]) -> bool:
    """Returns True if a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def width_of(stream: IO[str]) -> int:
    """Returns the width of a stream's lines, see `size_of`."""
    return size_of(stream)[0]


def size_of(stream: IO[str]) -> tuple[int, int]:
    """Returns columns and lines: those of COLUMNS and LINES, of the terminal, or large numbers for files.

    Args:
      stream: a terminal, a pipe or a file.
    """
    columns = lines = _UNLIMITED
    if stream.isatty():
        columns, lines = 0, 0
        with contextlib.suppress(OSError, ValueError):
            columns, lines = os.get_terminal_size(stream.fileno())
    return max(_NARROWEST, _number_in("COLUMNS") or columns or 80), _number_in("LINES") or lines or 24


def _number_in(variable: str) -> int:
    """Returns the positive number in a variable of the environment; 0 if it has none."""
    text = os.environ.get(variable, "")
    return min(int(text), _UNLIMITED) if text.isdecimal() and len(text) < 10 else 0


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
        from rich.cells import cell_len
        from rich.table import Table as RichTable
        from rich.text import Text

    heads, *rows = [[*map(escaped, row)] for row in (table.heads, *table.plain_rows)]
    if 1 + sum(1 + max(map(cell_len, column)) for column in zip(heads, *rows, strict=True)) > width:
        return Text("\n".join(_lines(heads, rows, table.note, width)))
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=0, caption=escaped(table.note) or None)
    for number, title in enumerate(heads):
        drawn.add_column(title, justify="left" if number in table.texts else "right", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _lines(heads: Sequence[str], rows: Sequence[Sequence[str]], note: str, width: int) -> Iterator[str]:
    for name, *cells in rows:
        pairs = zip(heads[1:], cells, strict=True)
        fields = [f"{title} {cell}" for title, cell in pairs if cell]
        yield name
        for line in wrapped("  ".join(fields), width - len(_INDENT)).splitlines():
            yield _INDENT + line.strip()
    if note:
        yield escaped(note)
