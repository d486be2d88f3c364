"""Files that commands write atomically: reports, diagnoses, plans and rules."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jmp_train.app.reports.tables import process_memory
from jmp_train.app.runs import Run, event_to_json, metrics_of_0_1
from jmp_train.policies.files import write_atomically
from jmp_train.tools import NumericsReport
from jmp_train.tools.documents import as_json, svg_file

if TYPE_CHECKING:
    from jmp_train.tools.planning import Plan
    from jmp_train.tools.tuning import TunedRules

_OF_RUN = (
    "policy", "rules", "phases", "device", "metrics", "higher_is_better", "compile_seconds", "memory_of",
    "iterations_per_second", "samples_per_second", "costs", "watch",
)  # fmt: skip
_OPTIONAL = ("rules", "phases", "watch")  # left out if a run has none
_OF_EPOCH = ("epoch", "loss", "seconds", "memory_mb", "loss_scale", "skipped_steps")

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
    from jmp_train.app.reports.charts import panels
    from jmp_train.app.reports.page import page

    title = f"{task} on {' and '.join(dict.fromkeys(run.device for run in runs))}"
    return _write_all(
        {
            directory / "report.json": lambda path: _write(path, json.dumps(report(task, runs), indent=2) + "\n"),
            directory / "report.svg": lambda path: _write(
                path, svg_file(panels(runs), columns=3, title=title, footnote=process_memory(runs))
            ),
            directory / "report.html": lambda path: _write(path, page(task, runs, failures)),
        }
    )


def report(task: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Returns the content of report.json; numbers that are not finite become null."""
    return as_json({"task": task, "runs": [_run_report(run) for run in runs]})


def _run_report(run: Run) -> dict[str, Any]:
    found = {name: getattr(run, name) for name in _OF_RUN}
    epochs = [event_to_json(epoch) for epoch in run.epochs]
    return {
        **{name: value for name, value in found.items() if value or name not in _OPTIONAL},
        **metrics_of_0_1(run),
        "epochs": [{name: epoch[name] for name in _OF_EPOCH} for epoch in epochs],
    }


def write_diagnosis(directory: Path, title: str, subject: Mapping[str, Any], found: NumericsReport) -> Written:
    """Writes diagnosis.html with this title, and diagnosis.json, which begins with the subject."""
    return _write_all(
        {
            directory / "diagnosis.html": lambda path: _write(path, found.to_html(title)),
            directory / "diagnosis.json": lambda path: _write(path, json_line(subject, found.as_dict())),
        }
    )


def write_plan(page: Path | None, title: str, plan: "Plan") -> Written:
    """Writes the page of a plan with this title, unless the file is None."""
    return _write_all({page: lambda path: _write(path, plan.to_html(title))})


def write_tuning(
    rules: Path | None, page: Path | None, title: str, subject: Mapping[str, Any], tuned: "TunedRules"
) -> Written:
    """Writes the files of rules and page with this title, except those that are None."""
    return _write_all(
        {
            rules: lambda path: tuned.rules.save(path, comment=_comment(title, subject, tuned)),
            page: lambda path: _write(path, tuned.to_html(title)),
        }
    )


def _comment(title: str, subject: Mapping[str, Any], tuned: "TunedRules") -> str:
    """Returns the comment of a rules file: subject, tolerance, and the entries with their reasons."""
    t = tuned.tolerance
    made = ", ".join(f"{name} {value}" for name, value in subject.items())
    return (
        f"jmp-train tune: {title}\n{made}\n"
        f"tolerance: loss {t.loss:.3g}, gradient {t.gradient:.3g}, leaf {t.leaf:.3g}, cosine {t.cosine:.3g}\n"
        f"{tuned}\nEntries by line follow the code: renew them when it is edited.\n\n"
    )


def _write_all(writers: Mapping[Path | None, Callable[[Path], object]]) -> Written:
    """Calls each writer with its path unless that is None, and collects failures."""
    written, problems = [], []
    for path in filter(None, writers):
        try:
            writers[path](path)
            written.append(path)
        except Exception as error:  # noqa: BLE001 - of any kind: the other files are still written
            problems.append(f"{path}: {getattr(error, 'strerror', None) or error}")
    return written, problems


def _write(path: Path, text: str) -> None:
    write_atomically(path, text.encode())
