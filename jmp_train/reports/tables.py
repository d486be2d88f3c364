"""What `jmp-train` prints and writes about finished runs: a table, report.json, .png and .html."""

import json
import math
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jmp_train.comparison import SPEED_TITLES, speed_rows
from jmp_train.records import Epoch, Run, event_to_json, finite_or_none
from jmp_train.terminal import Sheet, console_on
from jmp_train.whole_files import write_whole

_TITLES = ("policy", "s/epoch", "compile", "memory", "test accuracy", "loss", "scale", "skipped")
_REPORTED = ("epoch", "loss", "seconds", "memory_mb", "loss_scale", "skipped_steps")


def epoch_line(policy: str, epoch: Epoch, epochs: int) -> str:
    """Returns the line that is printed after an epoch."""
    return (
        f"{policy:<15} epoch {epoch.epoch:>{len(str(epochs))}}/{epochs}  loss {epoch.loss:.4f}  "
        f"learning rate {epoch.learning_rate:.2e}  {epoch.seconds:.2f} s  "
        f"peak memory {epoch.memory_mb:.0f} MB  loss scale {epoch.loss_scale:g}  "
        f"skipped steps {epoch.skipped_steps}"
    )


def report(task: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns report.json's content; numbers that are not finite become null."""
    return {"task": task, "runs": [_run_report(run) for run in runs]}


def _run_report(run: Run) -> dict[str, Any]:
    epochs = [event_to_json(epoch) for epoch in run.epochs]
    return {
        "policy": run.policy,
        "device": run.device,
        "test_accuracy": run.test_accuracy,
        "nonfinite_outputs": run.nonfinite_outputs,
        "compile_seconds": run.compile_seconds,
        "memory_of": run.memory_of,
        "iterations_per_second": run.iterations_per_second,
        "samples_per_second": run.samples_per_second,
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
    from jmp_train.html_report import page
    from jmp_train.pictures import png

    contents: dict[str, Callable[[], bytes]] = {
        "report.json": lambda: _json_report(task, runs),
        "report.png": lambda: png(task, runs),
        "report.html": lambda: page(task, runs, failures).encode(),
    }
    written, problems = [], []
    for name, content in contents.items():
        path = directory / name
        try:
            written.append(write_whole(path, content()))
        except OSError as error:
            problems.append(f"{path}: {error.strerror or error}")
        except (RuntimeError, ValueError) as error:
            # Matplotlib's, as for a font or a TeX that is not there.
            problems.append(f"{path}: {error}")
    return written, problems


def _json_report(task: str, runs: Sequence[Run]) -> bytes:
    return (json.dumps(finite_or_none(report(task, runs)), indent=2) + "\n").encode()


def print_table(runs: Sequence[Run]) -> None:
    """Prints the runs side by side, or one below the other where they would be too wide."""
    memory_of = " or ".join(dict.fromkeys(run.memory_of for run in runs))
    rows = [
        (
            run.policy,
            f"{run.epoch_seconds:.2f}",
            f"{run.compile_seconds:.1f} s",
            f"{run.memory_mb:.0f} MB",
            f"{run.test_accuracy:.2%}",
            f"{run.epochs[-1].loss:.4f}",
            _short(run.epochs[-1].loss_scale),
            str(run.epochs[-1].skipped_steps),
        )
        for run in runs
    ]
    console_on(sys.stdout).print(Sheet(_TITLES, rows, f"memory: peak of the {memory_of}"))


def _short(scale: float) -> str:
    """Returns a loss scale in few characters; from a million on, a power of two as such."""
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if scale >= 1e6 and fraction == 0.5 else f"{scale:g}"


def print_speed_table(runs: Sequence[Run]) -> None:
    """Prints speed and memory of the runs beside the first one's.

    Args:
      runs: at least one.
    """
    sheet = Sheet(SPEED_TITLES, speed_rows(runs), f"1.00x: {runs[0].policy}")
    console_on(sys.stdout).print(sheet)
