"""Live display of training: bars and a table on a terminal, lines elsewhere."""

from collections.abc import Sequence
from typing import IO, TYPE_CHECKING, Protocol, Self

from jmp_train.extras import extra_packages
from jmp_train.reports.comparison import in_bytes, metrics_note
from jmp_train.reports.tables import epoch_line, phase_line
from jmp_train.reports.terminal import Sheet, console_on, is_screen, width_of, wrapped
from jmp_train.runs import Compiled, Epoch, Event, Note, Phase, Planned, Progress, Run

if TYPE_CHECKING:
    from rich.console import Group


_TITLES = ("policy", "now", "loss", "scale", "skipped", "s/epoch", "compile", "saved")
_BESIDE_NAME_AND_COUNT = 40  # "steps", two clocks, a bar of ten, and gaps


class Display(Protocol):
    """Shows the events of runs as they come."""

    def __enter__(self) -> Self:
        """Starts to show."""
        ...

    def __exit__(self, *exception: object) -> None:
        """Stops to show."""

    def start(self, policy: str) -> None:
        """Shows that a policy's run begins."""

    def show(self, policy: str, event: Event) -> None:
        """Shows an event of a policy's run."""

    def fail(self, policy: str, reason: str) -> None:
        """Shows that a policy's run did not end."""


def display_on(stream: IO[str], policies: Sequence[str]) -> Display:
    """Returns the display that suits a stream: live on a terminal that can be, lines elsewhere.

    Args:
      stream: where to print.
      policies: the runs that will come.
    """
    if is_screen(stream):
        return LiveDisplay(stream, policies)
    return LineDisplay(stream)


class LineDisplay:
    """Prints a line an epoch."""

    def __init__(self, stream: IO[str]) -> None:
        self.stream = stream
        self.epochs = 0  # of the run that is shown, once it says
        self._memory_of: dict[str, str] = {}

    def __enter__(self) -> Self:
        """Does nothing."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Does nothing."""

    def start(self, policy: str) -> None:
        """Prints nothing."""

    def show(self, policy: str, event: Event) -> None:
        """Prints a line if the event is an epoch, or a phase that begins."""
        if isinstance(event, Planned):
            self.epochs = event.epochs
        if isinstance(event, Compiled):
            self._memory_of[policy] = event.memory_of
        if isinstance(event, Note):
            self._print(f"{policy:<15} {event.text}")
        if isinstance(event, Phase):
            self._print(phase_line(policy, event))
        if isinstance(event, Epoch):
            self._print(epoch_line(policy, event, self.epochs, self._memory_of.get(policy, "")))

    def fail(self, policy: str, reason: str) -> None:
        """Prints nothing: the command ends with the reason."""

    def _print(self, line: str) -> None:
        text = wrapped(line, width_of(self.stream)) if self.stream.isatty() else line
        print(text, file=self.stream, flush=True)


class LiveDisplay:
    """A progress bar for each run and a table of where each is, renewed as they go."""

    def __init__(self, stream: IO[str], policies: Sequence[str]) -> None:
        with extra_packages():
            from rich.live import Live
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

        self.epochs = 0  # of each run, once the first says
        self._rows = {policy: _Row() for policy in policies}
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._tasks = {policy: self._bars.add_task(policy, start=False, total=None) for policy in policies}
        self._stream = stream
        self._console = console_on(stream)
        self._live = Live(
            get_renderable=self._render,
            console=self._console,
            transient=True,
        )

    def __enter__(self) -> Self:
        """Starts to renew the screen."""
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Clears the bars and the table; the epochs' lines stay."""
        self._live.stop()

    def start(self, policy: str) -> None:
        """Starts a run's clock."""
        self._rows[policy].status = "loading"
        self._bars.start_task(self._tasks[policy])

    def show(self, policy: str, event: Event) -> None:
        """Renews a run's bar and row; prints a line above them of an epoch or a phase."""
        row, bar = self._rows[policy], self._tasks[policy]
        match event:
            case Planned(epochs, total):
                self.epochs, row.status = epochs, "compiling"
                self._bars.update(bar, total=total)
            case Compiled(seconds, memory_of, costs):
                row.status, row.compile = row.training, f"{seconds:.1f} s"
                row.memory_of = memory_of
                row.saved = "" if costs.residual_bytes is None else in_bytes(costs.residual_bytes)
            case Note():
                self._print(f"{policy:<15} {event.text}")
            case Phase():
                row.training = row.status = f"training, {event.policy}"
                self._print(phase_line(policy, event))
            case Progress(total, skipped_steps, recent):
                last = recent[-1]
                self._bars.update(bar, total=total, completed=last.step)
                row.loss, row.scale = f"{last.loss:.4f}", f"{last.loss_scale:g}"
                row.skipped = str(skipped_steps)
                row.steps = f"{last.step}" if total is None else f"{last.step}/{total}"
            case Epoch():
                row.seconds = f"{event.seconds:.2f}"
                row.status = "evaluating" if event.epoch == self.epochs else row.training
                self._print(epoch_line(policy, event, self.epochs, row.memory_of))
            case Run():
                row.status = metrics_note(event)

    def fail(self, policy: str, reason: str) -> None:
        """Marks a run as failed."""
        self._bars.stop_task(self._tasks[policy])
        self._rows[policy].status = "failed"
        self._print(f"{policy}: {reason}")

    def _print(self, line: str) -> None:
        text = wrapped(line, self._console.width)
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _render(self) -> "Group":
        """Returns the bars and the table; where bars do not fit, the table has the steps."""
        with extra_packages():
            from rich.console import Group

        rows = [
            (
                name,
                row.status,
                row.loss,
                row.scale,
                row.skipped,
                row.seconds,
                row.compile,
                row.saved,
            )
            for name, row in self._rows.items()
        ]
        self._console.width = width_of(self._stream)  # which may have changed
        names = max(map(len, self._rows))
        counts = max(len(row.steps) for row in self._rows.values())
        if names + counts + _BESIDE_NAME_AND_COUNT <= self._console.width:
            return Group(self._bars, Sheet(_TITLES, rows, left=2))
        steps = [row.steps for row in self._rows.values()]
        rows = [(*row[:2], count, *row[2:]) for row, count in zip(rows, steps, strict=True)]
        return Group(Sheet((*_TITLES[:2], "step", *_TITLES[2:]), rows, left=2))


class _Row:
    """What the live table says of one run."""

    def __init__(self) -> None:
        self.status = "waiting"
        self.training = "training"  # the status while it does, with the phase if there are several
        self.steps = ""
        self.loss = self.scale = self.skipped = self.seconds = self.compile = self.saved = ""
        self.memory_of = ""
