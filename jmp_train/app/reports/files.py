"""Files that commands write atomically, such as reports."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jmp_train.app.reports.tables import process_memory
from jmp_train.app.runs import Run, event_to_json
from jmp_train.policies.files import write_atomically
from jmp_train.tools.documents import as_json, svg_file

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
    from jmp_train.app.reports.page import page
    from jmp_train.app.reports.run_charts import panels

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
