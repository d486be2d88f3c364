"""What a tuning shows and leaves: the trials as they come, the file of the rules, the page."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jmp_train.extras import extra_packages
from jmp_train.policies.files import write_atomically
from jmp_train.reports.terminal import console_on, is_screen
from jmp_train.tuning import TunedRules


@contextmanager
def trials_shown(stream: IO[str]) -> Iterator[Callable[[int, str], None] | None]:
    """Shows on a terminal how many choices were tried and what is found so far; elsewhere nothing.

    Args:
      stream: where to.

    Yields:
      What `tune` takes as `progress`.
    """
    if not is_screen(stream):
        yield None
        return
    with extra_packages():
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20), TimeElapsedColumn())
    with Progress(*columns, console=console_on(stream), transient=True) as bars:
        bar = bars.add_task("compiling", total=None)

        def show(trials: int, found: str) -> None:
            bars.update(bar, description=f"trial {trials}: {found} (Ctrl-C takes it)")

        yield show


def write_tuning(
    rules: Path | None, page: Path | None, title: str, subject: Mapping[str, Any], tuned: TunedRules
) -> tuple[list[Path], list[str]]:
    """Writes the rules and the page, each whole or not at all.

    Args:
      rules: the file of the rules; None for none.
      page: that of the page; None for none.
      title: of both.
      subject: what was tuned, for the comments of the rules.
      tuned: what was found.

    Returns:
      The paths of the files that are written, and of each other one a line with its path and why it is not.
    """
    written, problems = [], []
    writers: dict[Path | None, Callable[[Path], object]] = {
        rules: lambda path: tuned.rules.save(path, comment=_comment(title, subject, tuned)),
        page: lambda path: write_atomically(path, tuned.to_html(title).encode(errors="backslashreplace")),
    }
    for path, write in writers.items():
        if path is None:
            continue
        try:
            write(path)
            written.append(path)
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        except ValueError as error:  # a path of the model that UTF-8 cannot have
            problems.append(f"{path}: {error}")
    return written, problems


def _comment(title: str, subject: Mapping[str, Any], tuned: TunedRules) -> str:
    """Returns what the rules are for, and what stays in float32 and why."""
    t = tuned.tolerance
    made = ", ".join(f"{name} {value}" for name, value in subject.items())
    return (
        f"jmp-train tune: {title}\n{made}\n"
        f"tolerance: loss {t.loss:.3g}, gradient {t.gradient:.3g}, leaf {t.leaf:.3g}, cosine {t.cosine:.3g}\n"
        f"{tuned}\nEntries by line follow the code: renew them when it is edited.\n\n"
    )


def tuning_json(subject: Mapping[str, Any], tuned: TunedRules) -> str:
    """Returns what was found as a line of JSON.

    Args:
      subject: what was tuned, the first entries.
      tuned: what was found.
    """
    return json.dumps({**subject, **tuned.to_json()}, allow_nan=False) + "\n"
