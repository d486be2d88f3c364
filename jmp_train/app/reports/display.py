"""Terminal output of commands: lines, progress bars, tables; warnings in place of errors in showing them.

Names that users chose are text: nothing in them is markup, an emoji code or a control character.
"""

import contextlib
import functools
import math
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Any, Self

from jmp_train.app.reports.page import metrics_note
from jmp_train.app.reports.tables import cost_table, process_memory, runs_table, speed_table, watch_table
from jmp_train.app.runs import Compiled, Epoch, Event, Note, Phase, Planned, Progress, Run
from jmp_train.extras import extra_packages
from jmp_train.policies.files import escaped
from jmp_train.tools.documents import Table

if TYPE_CHECKING:
    from rich.progress import TextColumn


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


@showing()
def print_tables(runs: Sequence[Run], *, has_speeds: bool = False) -> None:
    """Prints tables of the runs.

    They are the results, the costs of a step on any device, and the watched fractions. The footnote is the memory of
    processes.

    Args:
      runs: the runs, at least one.
      has_speeds: True for a last table of speed and device memory, compared with the first run.
    """
    console = console_on(sys.stdout)
    for table in (runs_table(runs), cost_table(runs), watch_table(runs)):
        if table.rows:
            console.print(sheet(table))
    if footnote := process_memory(runs):
        console.print(escaped(footnote), style="dim")
    if has_speeds:
        console.print(sheet(speed_table(runs)))


def epoch_line(policy: str, epoch: Epoch, epochs: int, memory_of: str) -> str:
    """Returns the line of an epoch; `epochs` is 0 if unknown. It has the peak memory only if that is a device's."""
    number = f"{epoch.epoch:>{len(str(epochs))}}/{epochs}" if epochs else f"{epoch.epoch}"
    rate = "" if math.isnan(epoch.learning_rate) else f"learning rate {epoch.learning_rate:.2e}  "
    memory = f"peak memory {epoch.memory_mb:.0f} MB  " if memory_of == "device" else ""
    return (
        f"{policy:<15} epoch {number}  loss {epoch.loss:.4f}  {rate}{epoch.seconds:.2f} s  "
        f"{memory}loss scale {epoch.loss_scale:g}  skipped steps {epoch.skipped_steps}"
    )


@contextlib.contextmanager
def _counts_shown(first: str, later: str, stream: IO[str]) -> Iterator[Callable[[int, str], None] | None]:
    """Shows the progress of a search on a terminal, and yields its `progress` argument; None without a terminal.

    `first` is shown before the first count. `later` is a format string for the count and a text about it.
    """
    if not is_screen(stream):
        yield None
        return
    with extra_packages():
        from rich import progress

    with contextlib.ExitStack() as stack:
        update = None
        with showing():
            columns = progress.SpinnerColumn(), _text("description"), progress.TimeElapsedColumn()
            bars = progress.Progress(*columns, console=console_on(stream), transient=True)
            bar = bars.add_task(first, total=None)
            bars.start()
            stack.callback(showing()(bars.stop))
            update = showing()(lambda count, said: bars.update(bar, description=escaped(later.format(count, said))))
        yield update


def _text(field: str) -> "TextColumn":
    """Returns a column with a field of bars as text; rich's default reads markup."""
    with extra_packages():
        from rich import progress

    return progress.TextColumn(f"{{task.{field}}}", markup=False)


compilations_shown = partial(_counts_shown, "tracing", "{} compiled, next {}")
trials_shown = partial(_counts_shown, "compiling", "trial {}: {} (Ctrl-C takes it)")


def display_on(stream: IO[str], policies: Sequence[str]) -> "LineDisplay":
    """Returns a display of the runs of these policies: live on a capable terminal, otherwise lines."""
    with showing():
        if is_screen(stream):
            return LiveDisplay(stream, policies)
    return LineDisplay(stream)


class LineDisplay:
    """Prints one line per epoch; a context manager to which runs report events. Its methods raise no errors."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.epochs = 0  # of the run, once known
        self._memory_of: dict[str, str] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def start(self, policy: str) -> None:
        """Shows that a policy's run begins; prints nothing here."""

    def fail(self, policy: str, reason: str) -> None:
        """Shows that a policy's run failed; prints nothing here, because the command ends with the reason."""

    @showing()
    def show(self, policy: str, event: Event) -> None:
        """Prints a line if the event is an epoch, a note, or the start of a phase."""
        match event:
            case Planned():
                self.epochs = event.epochs
            case Compiled():
                self._memory_of[policy] = event.memory_of
            case Note():
                self._print(f"{policy:<15} {event.text}")
            case Phase():
                self._print(f"{policy:<15} from step {event.start + 1} to {event.stop} in {event.policy}")
            case Epoch():
                self._print(epoch_line(policy, event, self.epochs, self._memory_of.get(policy, "")))

    def _print(self, line: str) -> None:
        print_text(line, self.stream)


class LiveDisplay(LineDisplay):
    """Shows a progress bar with a status for each run below the lines, and updates them."""

    def __init__(self, stream: IO[str], policies: Sequence[str]) -> None:
        with extra_packages():
            from rich import progress

        super().__init__(stream)
        counts = progress.BarColumn(10), progress.MofNCompleteColumn(), progress.TimeRemainingColumn()
        columns = _text("description"), *counts, _text("fields[status]")
        self._bars = progress.Progress(*columns, console=console_on(stream), transient=True)
        self._tasks = {
            policy: self._bars.add_task(escaped(policy), start=False, total=None, status="waiting")
            for policy in policies
        }

    def __enter__(self) -> Self:
        with showing():
            self._bars.start()
        return self

    @showing()
    def __exit__(self, *exception: object) -> None:
        self._bars.stop()  # clears the bars; the lines stay

    @showing()
    def start(self, policy: str) -> None:
        """Starts a run's clock."""
        self._update(policy, "loading")
        self._bars.start_task(self._tasks[policy])

    @showing()
    def show(self, policy: str, event: Event) -> None:
        """Updates a run's bar and status, and prints the event's line, if it has one, above them."""
        match event:
            case Planned(_, total):
                self._update(policy, "compiling", total=total)
            case Compiled():
                self._update(policy, "training")
            case Progress(total, skipped_steps, recent):
                last = recent[-1]
                status = f"loss {last.loss:.4f}  scale {last.loss_scale:g}  skipped {skipped_steps}"
                self._update(policy, status, total=total, completed=last.step)
            case Epoch() if event.epoch == self.epochs:
                self._update(policy, "evaluating")
            case Run():
                self._update(policy, metrics_note(event))
        super().show(policy, event)

    @showing()
    def fail(self, policy: str, reason: str) -> None:
        """Marks a run as failed."""
        self._bars.stop_task(self._tasks[policy])
        self._update(policy, "failed")
        self._print(f"{policy}: {reason}")

    def _update(self, policy: str, status: str, **counts: Any) -> None:
        self._bars.update(self._tasks[policy], status=escaped(status), **counts)

    def _print(self, line: str) -> None:
        self._bars.console.print(escaped(line, "\n"), soft_wrap=True)


if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
