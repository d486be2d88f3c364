"""What `jmp-train` prints and writes: a line an epoch, a table of the runs, report.json."""

import dataclasses
import json
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jmp_train.training import Epoch, Run

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
    return {"task": task, "runs": [run_report(run) for run in runs]}


def run_report(run: Run) -> dict[str, Any]:
    """Returns one run's part of the report."""
    epochs = [{name: epoch_json(epoch)[name] for name in _REPORTED} for epoch in run.epochs]
    return {"policy": run.policy, "test_accuracy": run.test_accuracy, "epochs": epochs}


def epoch_json(epoch: Epoch) -> dict[str, float | None]:
    """Returns an epoch as JSON has it: numbers that are not finite become null."""
    fields = dataclasses.asdict(epoch)
    return {name: value if math.isfinite(value) else None for name, value in fields.items()}


def epoch_from_json(fields: dict[str, Any]) -> Epoch:
    """Returns the epoch that `epoch_json` made `fields` of."""
    numbers: dict[str, Any] = {name: math.nan if x is None else x for name, x in fields.items()}
    return Epoch(**numbers)


def write_report(directory: Path, content: dict[str, Any]) -> Path:
    """Writes `directory/report.json` beside and renames it, so that no half report is ever there."""
    path = directory / "report.json"
    beside = directory / f".report.json.{os.getpid()}"
    beside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n")
    beside.replace(path)
    return path


def print_table(runs: Sequence[Run], memory_of: str) -> None:
    """Prints the runs side by side; `memory_of` is "device" or "process"."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, caption=f"memory: peak of the {memory_of}")
    table.add_column("policy", no_wrap=True)
    for title in ("s/epoch", "memory", "test accuracy", "loss", "scale", "skipped"):
        table.add_column(title, justify="right", no_wrap=True)
    for run in runs:
        last = run.epochs[-1]
        table.add_row(
            run.policy,
            f"{statistics.median(epoch.seconds for epoch in run.epochs):.2f}",
            f"{last.memory_mb:.0f} MB",
            f"{run.test_accuracy:.2%}",
            f"{last.loss:.4f}",
            f"{last.loss_scale:g}",
            str(last.skipped_steps),
        )
    Console().print(table)
