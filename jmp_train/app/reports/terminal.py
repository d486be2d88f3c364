"""Text and tables on the terminal, and warnings in place of errors in showing them.

Names that users chose are text: nothing in them is markup, an emoji code or a control character.
"""

import contextlib
import functools
import os
import re
import sys
from collections.abc import Iterator
from typing import IO, TYPE_CHECKING

from jmp_train.extras import extra_packages
from jmp_train.policies.files import escaped
from jmp_train.tools.documents import Table

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable


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

    It has no styles if NO_COLOR is set or the stream is not a terminal, and no limit of its width if the stream is not
    a terminal and COLUMNS is not set.

    Args:
      stream: the stream to print to.
    """
    with extra_packages():
        from rich.console import Console

    colors = None if os.environ.get("NO_COLOR") else "auto"
    sizes = {name: x for name in ("COLUMNS", "LINES") if re.fullmatch("[1-9][0-9]{1,3}", x := os.environ.get(name, ""))}
    if not stream.isatty():
        sizes.setdefault("COLUMNS", "10000")
    # rich reads the size of the terminal from the environment, and fails on some values of COLUMNS and LINES.
    environment = {name: x for name, x in os.environ.items() if name not in ("COLUMNS", "LINES")} | sizes
    return Console(file=stream, color_system=colors, markup=False, emoji=False, highlight=False, _environ=environment)


def is_screen(stream: IO[str]) -> bool:
    """Returns True if a stream is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("dumb", "unknown")


def sheet(table: Table) -> "RichTable":
    """Returns a table for rich to print."""
    with extra_packages():
        from rich import box
        from rich.table import Table as RichTable

    drawn = RichTable(box=box.SIMPLE_HEAD, padding=0, caption=escaped(table.note) or None)
    for number, title in enumerate(table.heads):
        drawn.add_column(escaped(title), justify="left" if number in table.texts else "right", overflow="fold")
    for row in table.plain_rows:
        drawn.add_row(*map(escaped, row))
    return drawn
