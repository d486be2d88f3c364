"""What a plan shows and leaves: the compilations as they come, the page, the JSON."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from jmp_train.extras import extra_packages
from jmp_train.policies.files import write_atomically
from jmp_train.reports.terminal import console_on, is_screen

if TYPE_CHECKING:
    from jmp_train.planning import Plan


@contextmanager
def compilations_shown(stream: IO[str]) -> Iterator[Callable[[int, str], None] | None]:
    """Shows on a terminal how many programs are compiled and what comes next; elsewhere nothing.

    Args:
      stream: where to.

    Yields:
      What `plan` takes as `progress`.
    """
    if not is_screen(stream):
        yield None
        return
    with extra_packages():
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=console_on(stream), transient=True) as bars:
        bar = bars.add_task("tracing", total=None)

        def show(done: int, what: str) -> None:
            bars.update(bar, description=f"{done} compiled, next {what}")

        yield show


def write_plan(page: Path | None, title: str, plan: "Plan") -> tuple[list[Path], list[str]]:
    """Writes the page, whole or not at all.

    Args:
      page: the file; None for none.
      title: of the page.
      plan: what was found.

    Returns:
      The paths of the files that are written, and of each other one a line with its path and why it is not.
    """
    if page is None:
        return [], []
    try:
        return [write_atomically(page, plan.to_html(title).encode(errors="backslashreplace"))], []
    except OSError as error:
        return [], [f"{page}: {error.strerror or error}"]


def plan_json(subject: Mapping[str, Any], plan: "Plan") -> str:
    """Returns a plan as a line of JSON.

    Args:
      subject: what was planned, the first entries.
      plan: what was found.
    """
    return json.dumps({**subject, **plan.to_json()}, allow_nan=False) + "\n"
