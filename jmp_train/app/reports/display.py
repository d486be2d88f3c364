"""Terminal output of commands during and after their work: lines, progress bars, tables."""

import contextlib
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import IO, TYPE_CHECKING, Self

from jmp_train.app.reports.page import metrics_note
from jmp_train.app.reports.tables import cost_table, process_memory, runs_table, speed_table, watch_table
from jmp_train.app.reports.terminal import console_on, is_screen, print_text, sheet, showing, size_of, width_of, wrapped
from jmp_train.app.runs import Compiled, Epoch, Event, Note, Phase, Planned, Progress, Run
from jmp_train.extras import extra_packages
from jmp_train.policies.files import escaped
from jmp_train.tools.documents import Table, with_unit

if TYPE_CHECKING:
    from rich.console import Group
    from rich.progress import TextColumn


_CELLS = ("now", "step", "loss", "scale", "skipped", "s/epoch", "compile", "saved")
_BESIDE_NAME_AND_COUNT = 40  # width of "steps", two clocks, a bar of ten, and gaps


@showing()
def print_tables(runs: Sequence[Run], *, has_speeds: bool = False) -> None:
    """Prints tables of the runs, or one run below the other if the screen is too narrow.

    They are the results, the costs of a step on any device, and the watched fractions. The footnote is the memory of
    processes.

    Args:
      runs: the runs, at least one.
      has_speeds: True for a last table of speed and device memory, compared with the first run.
    """
    console = console_on(sys.stdout)
    for table in (runs_table(runs), cost_table(runs), watch_table(runs)):
        if table.rows:
            console.print(sheet(table, console.width))
    if footnote := process_memory(runs):
        console.print(escaped(footnote), style="dim")
    if has_speeds:
        console.print(sheet(speed_table(runs), console.width))


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
            columns = progress.SpinnerColumn(), _description(), progress.TimeElapsedColumn()
            bars = progress.Progress(*columns, console=console_on(stream), transient=True)
            bar = bars.add_task(first, total=None)
            bars.start()
            stack.callback(showing()(bars.stop))
            update = showing()(lambda count, said: bars.update(bar, description=escaped(later.format(count, said))))
        yield update


def _description() -> "TextColumn":
    """Returns the column of the descriptions of bars as text; rich's default reads markup."""
    with extra_packages():
        from rich import progress

    return progress.TextColumn("{task.description}", markup=False)


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
        print_text(wrapped(line, width_of(self.stream)) if self.stream.isatty() else line, self.stream)


class LiveDisplay(LineDisplay):
    """Shows a progress bar and a table row for each run below the lines, and updates them."""

    def __init__(self, stream: IO[str], policies: Sequence[str]) -> None:
        with extra_packages():
            from rich import progress
            from rich.live import Live

        super().__init__(stream)
        self._rows = {policy: dict.fromkeys(_CELLS, "") | {"now": "waiting"} for policy in policies}
        self._training = dict.fromkeys(policies, "training")  # and the phase, if there are several
        clocks = progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        counts = progress.BarColumn(), progress.MofNCompleteColumn(), "steps"
        self._bars = progress.Progress(_description(), *counts, *clocks)
        self._tasks = {policy: self._bars.add_task(escaped(policy), start=False, total=None) for policy in policies}
        self._console = console_on(stream)
        self._live = Live(get_renderable=self._render, console=self._console, transient=True)

    def __enter__(self) -> Self:
        with showing():
            self._live.start()
        return self

    @showing()
    def __exit__(self, *exception: object) -> None:
        self._live.stop()  # clears bars and table; the lines stay

    @showing()
    def start(self, policy: str) -> None:
        """Starts a run's clock."""
        self._rows[policy]["now"] = "loading"
        self._bars.start_task(self._tasks[policy])

    @showing()
    def show(self, policy: str, event: Event) -> None:
        """Updates a run's bar and row, and prints the event's line, if it has one, above them."""
        row, bar = self._rows[policy], self._tasks[policy]
        match event:
            case Planned(_, total):
                row["now"] = "compiling"
                self._bars.update(bar, total=total)
            case Compiled(seconds, _, costs):
                row["now"], row["compile"] = self._training[policy], f"{seconds:.1f} s"
                row["saved"] = "" if costs.residual_bytes is None else with_unit(costs.residual_bytes, "B")
            case Phase():
                row["now"] = self._training[policy] = f"training, {event.policy}"
            case Progress(total, skipped_steps, recent):
                last = recent[-1]
                self._bars.update(bar, total=total, completed=last.step)
                row["step"] = f"{last.step}" if total is None else f"{last.step}/{total}"
                row["loss"], row["scale"] = f"{last.loss:.4f}", f"{last.loss_scale:g}"
                row["skipped"] = str(skipped_steps)
            case Epoch():
                row["s/epoch"] = f"{event.seconds:.2f}"
                row["now"] = "evaluating" if event.epoch == self.epochs else self._training[policy]
            case Run():
                row["now"] = metrics_note(event)
        super().show(policy, event)

    @showing()
    def fail(self, policy: str, reason: str) -> None:
        """Marks a run as failed."""
        self._bars.stop_task(self._tasks[policy])
        self._rows[policy]["now"] = "failed"
        self._print(f"{policy}: {reason}")

    def _print(self, line: str) -> None:
        self._console.print(wrapped(escaped(line, "\n"), self._console.width), soft_wrap=True)

    def _render(self) -> "Group":
        """Returns bars and table; if the bars do not fit, only a table with the steps."""
        with extra_packages():
            from rich.console import Group

        self._console.size = size_of(self.stream)  # the user may have resized the terminal
        counts = max(len(row["step"]) for row in self._rows.values())
        has_bars = max(map(len, self._rows)) + counts + _BESIDE_NAME_AND_COUNT <= self._console.width
        heads = [name for name in _CELLS if name != "step" or not has_bars]
        rows = [(policy, *(row[head] for head in heads)) for policy, row in self._rows.items()]
        table = sheet(Table(("policy", *heads), rows, texts=(0, 1)), self._console.width)
        return Group(self._bars, table) if has_bars else Group(table)
