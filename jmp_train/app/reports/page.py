"""A comparison in words, as the page report.html, and as files that commands write atomically."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jmp_train.app.reports import tables
from jmp_train.app.reports.tables import panels, process_memory
from jmp_train.app.runs import NONFINITE, Run, event_to_json
from jmp_train.policies.files import write_atomically
from jmp_train.tools import documents as doc
from jmp_train.tools.documents import as_json, svg_file

_SECONDS = "An epoch's seconds are of training alone, without compilation and test; the table has the median."
_ON_CPU = (
    "XLA computes most of half precision in float32 on CPUs, so that it saves little time there; what a step saves "
    "for its backward pass and what is in half are the program's, on any device."
)


def page(task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the page as HTML.

    Args:
      task: the task's name.
      runs: the runs, at least one; the others are compared with the first.
      failures: (policy, reason) of each failed run.
    """
    failed = [doc.Text(f"{policy} did not end: {reason}", look="failed") for policy, reason in failures]
    devices = " and ".join(dict.fromkeys(run.device for run in runs))
    memory = tables.process_memory(runs)
    return doc.page(
        f"{task}: {' / '.join(run.policy for run in runs)}",
        [
            *map(doc.Text, explanations(runs)),
            *failed,
            tables.runs_table(runs, has_ranges=True),
            tables.cost_table(runs),
            tables.speed_table(runs),
            tables.watch_table(runs),
            doc.Panels(panels(runs)),
            *map(_epochs, runs),
        ],
        [
            f"On {devices} with jax {jax.__version__}. {_SECONDS}",
            *([_ON_CPU] if tables.is_on_cpu(runs) else []),
            *([f"{memory[0].upper()}{memory[1:]}."] if memory else []),
        ],
    )


def _epochs(run: Run) -> doc.Section:
    rows = [
        (
            str(epoch.epoch),
            f"{epoch.loss:.4f}",
            "" if math.isnan(epoch.learning_rate) else f"{epoch.learning_rate:.2e}",
            f"{epoch.seconds:.2f}",
            tables.short_scale(epoch.loss_scale),
            str(epoch.skipped_steps),
        )
        for epoch in run.epochs
    ]
    heads = ("epoch", "loss", "learning rate", "seconds", "scale", "skipped")
    return doc.Section(f"{run.policy}, epoch by epoch", [doc.Table(heads, rows)], is_folded=True)


def metrics_note(run: Run) -> str:
    """Returns "test accuracy 98.61%, bits/byte 2.1234", or the last loss of a run without metrics."""
    titles = tables.metric_titles(tables.shown_metrics([run]))
    shown = (f"{title} {tables.metric_text(run, name)}" for name, title in titles.items())
    return ", ".join(shown) or f"loss {run.epochs[-1].loss:.4f}"


def explanations(runs: Sequence[Run]) -> list[str]:
    """Returns notes about runs: phases, rules from a file, non-finite outputs."""
    return [note for run in runs for note in _notes(run)]


def _notes(run: Run) -> Iterator[str]:
    if run.phases:
        said = [
            f"{phase.policy} in steps {phase.start + 1} to {phase.stop} "
            f"({phase.costs.half_flops_share:.1%} of the flops in half precision)"
            for phase in run.phases
        ]
        yield f"{run.policy}: {', '.join(said)}"
    if run.rules:
        yield f"{run.policy}: autocast by the rules of {run.rules}"
    if count := run.metrics.get(NONFINITE):
        yield f"{run.policy}: for {count} of the test data the model's output is not finite, which counts as wrong"


Written = tuple[list[Path], list[str]]
"""The written files, and one line per file that could not be written, with path and reason."""


def json_line(subject: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    """Returns a line of JSON that begins with the subject of a tool."""
    return json.dumps({**subject, **found}, allow_nan=False) + "\n"


def write_report(directory: Path, task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> Written:
    """Writes report.json, report.svg and report.html.

    Args:
      directory: an existing folder.
      task: the task's name.
      runs: the runs, at least one; the others are compared with the first.
      failures: (policy, reason) of each failed run.
    """
    from jmp_train.app.reports.tables import panels

    title = f"{task} on {' and '.join(dict.fromkeys(run.device for run in runs))}"
    return write_files(
        {
            directory / "report.json": lambda: json.dumps(report(task, runs), indent=2) + "\n",
            directory / "report.svg": lambda: svg_file(
                panels(runs), columns=3, title=title, footnote=process_memory(runs)
            ),
            directory / "report.html": lambda: page(task, runs, failures),
        }
    )


def report(task: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the content of report.json: runs as events, without steps; numbers that are not finite are null."""
    return {"task": task, "runs": [_run_report(run) for run in runs]}


def _run_report(run: Run) -> dict[str, Any]:
    speeds = {"iterations_per_second": run.iterations_per_second, "samples_per_second": run.samples_per_second}
    return {name: x for name, x in event_to_json(run).items() if name not in ("event", "steps")} | as_json(speeds)


def write_files(texts: Mapping[Path, Callable[[], str | None]]) -> Written:
    """Writes files one by one, whatever becomes of the others.

    Args:
      texts: functions that return the texts, by file; or None if they have written it.
    """
    written, problems = [], []
    for path, made in texts.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            text = made()
            if text is not None:
                write_atomically(path, text.encode())
            written.append(path)
        except Exception as error:  # noqa: BLE001 - of any kind: the other files are still written
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    return written, problems
