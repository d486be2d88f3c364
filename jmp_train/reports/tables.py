"""The report of finished runs: printed tables, and report.json, .png and .html."""

import dataclasses
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jmp_train.policies.files import write_atomically
from jmp_train.reports.comparison import (
    WATCH_NOTE,
    WATCH_TITLES,
    cost_table,
    metric_cells,
    metric_title,
    process_memory,
    reports_memory,
    short_scale,
    shown_metrics,
    speed_table,
    watch_rows,
)
from jmp_train.reports.terminal import Sheet, console_on
from jmp_train.runs import Epoch, Phase, Run, event_to_json, finite_or_none, metrics_of_0_1

_REPORTED = ("epoch", "loss", "seconds", "memory_mb", "loss_scale", "skipped_steps")


def epoch_line(policy: str, epoch: Epoch, epochs: int, memory_of: str) -> str:
    """Returns the line that is printed after an epoch, with the memory if it is the device's.

    Args:
      policy: the run's.
      epoch: which is over.
      epochs: how many there will be; 0 if that is not known.
      memory_of: see `Run`.
    """
    number = f"{epoch.epoch:>{len(str(epochs))}}/{epochs}" if epochs else f"{epoch.epoch}"
    memory = f"peak memory {epoch.memory_mb:.0f} MB  " if memory_of == "device" else ""
    return (
        f"{policy:<15} epoch {number}  loss {epoch.loss:.4f}  "
        f"{_rate(epoch)}{epoch.seconds:.2f} s  "
        f"{memory}loss scale {epoch.loss_scale:g}  "
        f"skipped steps {epoch.skipped_steps}"
    )


def _rate(epoch: Epoch) -> str:
    return "" if math.isnan(epoch.learning_rate) else f"learning rate {epoch.learning_rate:.2e}  "


def phase_line(policy: str, phase: Phase) -> str:
    """Returns the line that is printed where a phase begins or goes on.

    Args:
      policy: the run's.
      phase: that begins.
    """
    return f"{policy:<15} from step {phase.start + 1} to {phase.stop} in {phase.policy}"


def report(task: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns report.json's content; numbers that are not finite become null."""
    return {"task": task, "runs": [_run_report(run) for run in runs]}


def _run_report(run: Run) -> dict[str, Any]:
    epochs = [event_to_json(epoch) for epoch in run.epochs]
    return {
        "policy": run.policy,
        **({"rules": run.rules} if run.rules else {}),
        **({"phases": [dataclasses.asdict(phase) for phase in run.phases]} if run.phases else {}),
        "device": run.device,
        "metrics": run.metrics,
        "higher_is_better": run.higher_is_better,
        **metrics_of_0_1(run),
        "compile_seconds": run.compile_seconds,
        "memory_of": run.memory_of,
        "iterations_per_second": run.iterations_per_second,
        "samples_per_second": run.samples_per_second,
        "costs": dataclasses.asdict(run.costs),
        **({"watch": run.watch} if run.watch else {}),
        "epochs": [{name: epoch[name] for name in _REPORTED} for epoch in epochs],
    }


def write_report(
    directory: Path, task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()
) -> tuple[list[Path], list[str]]:
    """Writes report.json, report.png and report.html, each whole or not at all.

    Args:
      directory: where to; it exists.
      task: the task's name.
      runs: at least one; the others are compared with the first.
      failures: (policy, reason) of each run that did not end.

    Returns:
      The paths of the files that are written, and of each other one a line with its path and why it is not.
    """
    from jmp_train.reports.html_report import page
    from jmp_train.reports.plots import png

    contents: dict[str, Callable[[], bytes]] = {
        "report.json": lambda: _json_report(task, runs),
        "report.png": lambda: png(task, runs),
        "report.html": lambda: page(task, runs, failures).encode(),
    }
    return write_all(directory, contents)


def write_all(directory: Path, contents: Mapping[str, Callable[[], bytes]]) -> tuple[list[Path], list[str]]:
    """Writes files, each whole or not at all.

    Args:
      directory: where to; it exists.
      contents: what makes the content of a file, by its name.

    Returns:
      The paths of the files that are written, and of each other one a line with its path and why it is not.
    """
    written, problems = [], []
    for name, content in contents.items():
        path = directory / name
        try:
            written.append(write_atomically(path, content()))
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        except (RuntimeError, ValueError) as error:
            # Matplotlib's, as for a font or a TeX that is not there.
            problems.append(f"{path}: {error}")
    return written, problems


def _json_report(task: str, runs: Sequence[Run]) -> bytes:
    return (json.dumps(finite_or_none(report(task, runs)), indent=2) + "\n").encode()


def print_table(runs: Sequence[Run]) -> None:
    """Prints the runs side by side, or one below the other where the screen has no room for that.

    A second table has what a step costs on any device, a third what was watched; the footnote is the memory of
    processes.

    Args:
      runs: at least one.
    """
    names = shown_metrics(runs)
    measured = [*map(metric_title, names)]
    loss = "train loss" if "loss" in measured else "loss"
    titles = ("policy", "s/epoch", "compile", *measured, loss, "scale", "skipped")
    rows = [
        (
            run.policy,
            f"{run.epoch_seconds:.2f}",
            f"{run.compile_seconds:.1f} s",
            *metric_cells(run, names),
            f"{run.epochs[-1].loss:.4f}",
            short_scale(run.epochs[-1].loss_scale),
            str(run.epochs[-1].skipped_steps),
        )
        for run in runs
    ]
    if reports_memory(runs):
        titles = (*titles, "memory")
        rows = [(*row, f"{run.memory_mb:.0f} MB") for row, run in zip(rows, runs, strict=True)]
    console = console_on(sys.stdout)
    console.print(Sheet(titles, rows))
    cost_titles, costs, note = cost_table(runs)
    console.print(Sheet(cost_titles, costs, note))
    if watched := watch_rows(runs):
        console.print(Sheet(WATCH_TITLES, watched, WATCH_NOTE))
    if footnote := process_memory(runs):
        console.print(footnote, style="dim", highlight=False, markup=False)


def print_speed_table(runs: Sequence[Run]) -> None:
    """Prints the speed of the runs, and the memory of their devices, beside the first one's.

    Args:
      runs: at least one.
    """
    caption = f"1.00x: {runs[0].policy}" if len(runs) > 1 else None
    console_on(sys.stdout).print(Sheet(*speed_table(runs), caption))
