"""Makes the page of benchmark results from the files in `benchmarks/results`, when the site is built.

Each file has its section, so that a new one appears by itself: what its script measures, by the script's first line;
date, device and command of each run; tables of all figures.
"""

import ast
import datetime
import json
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from json_tables import Record, Table, tables
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = "project/results"
NEEDED = ("date", "device", "command")
INTRODUCTION = """# Benchmark results

All figures of the files in `benchmarks/results`, from which this page is made. [Benchmarks](benchmarks.md) says what
they mean, and how to run each script. For many numbers a cell has their median and, in brackets, least and most."""


class Results(NamedTuple):
    """What a file of results has.

    Attributes:
      file: its path.
      script: that wrote it.
      summary: what the script measures.
      runs: date, device, command of each, and what else is known of it.
      figures: all else in the file.
    """

    file: Path
    script: Path
    summary: str
    runs: list[dict[str, str]]
    figures: Record


def read_results(file: Path) -> Results:
    """Returns what a file of results has.

    Args:
      file: in the folder `results` beside the scripts, named as its script; those of `gpu.py` are `gpu_DEVICE.json`.

    Raises:
      ValueError: the file does not say of each of its runs when, on which device and by which command it was, or
        there is no script of its name.
    """
    figures = json.loads(file.read_text())
    runs = figures.pop("runs", None) if isinstance(figures, dict) else None
    if not runs:
        raise ValueError(f'{file} lacks "runs", a list of {", ".join(NEEDED)}: write it by result_files.write_results')
    for index, run in enumerate(runs):
        lacking = [name for name in NEEDED if not run.get(name)]
        if lacking:
            raise ValueError(f"{file} lacks {', '.join(lacking)} in runs[{index}], which has {sorted(run)}")
        try:
            datetime.date.fromisoformat(run["date"])
        except ValueError as error:
            raise ValueError(f"{file}: date of runs[{index}] is {run['date']!r}, wanted is 2026-11-23 or so") from error
    name = "gpu" if file.stem.startswith("gpu_") else file.stem
    script = file.parents[1] / f"{name}.py"
    if not script.exists():
        raise ValueError(f"{file} has no script {script.name} in {script.parent}")
    summary = (ast.get_docstring(ast.parse(script.read_text())) or "").partition("\n\n")[0]
    measured = {key: x for key, x in figures.items() if key not in runs[-1]}  # of jax and device each run has its own
    return Results(file, script, summary.replace("\n", " "), runs, measured)


def page_of(results: list[Results]) -> str:
    """Returns the page in MyST's Markdown.

    Args:
      results: in the order in which they are shown.
    """
    rows = [f"| [{x.file.stem}](#{_anchor(x)}) | {x.summary} | {max(run['date'] for run in x.runs)} |" for x in results]
    index = "\n".join(["| file | what it measures | date |", "| --- | --- | --- |", *rows])
    return "\n\n".join([INTRODUCTION, index, *(part for x in results for part in _section(x))]) + "\n"


def _anchor(results: Results) -> str:
    return f"results-{results.file.stem}"


def _section(results: Results) -> Iterator[str]:
    """Yields the paragraphs of a file's section."""
    yield f"({_anchor(results)})=\n## {results.file.stem}"
    folder = f"../../{BENCHMARKS.name}"
    script, file = results.script.name, results.file.name
    yield f"{results.summary} [{script}]({folder}/{script}) wrote [{file}]({folder}/results/{file})."
    yield "\n".join(_run(run) for run in results.runs)
    for table in tables(results.figures):
        yield _table(table)


def _run(run: dict[str, str]) -> str:
    """Returns an item of a list: a run's date and device, its command, and what else is known of it."""
    more = [f"{name} {x}" for name, x in run.items() if name not in (*NEEDED, "remark")]
    about = ", ".join([run["date"], run["device"], *more])
    remark = f" ({run['remark']})" if "remark" in run else ""
    return f"- {about}{remark}:\n  ```sh\n  {run['command']}\n  ```"


def _table(table: Table) -> str:
    """Returns a table that scrolls sideways where it is wide, with what all of its rows share, or a list of texts."""
    if len(table.header) == 1:
        return "\n".join([f"{_escaped(table.title)}:", "", *(f"- {_escaped(cell)}" for (cell,) in table.rows)])
    shared = "; ".join(f"{name} {cell}" for name, cell in table.shared.items())
    caption = ": in all rows ".join(_escaped(text) for text in (table.title, shared) if text)
    rows = [table.header, ("---",) * len(table.header), *table.rows]
    lines = [f"| {' | '.join(map(_escaped, row))} |" for row in rows]
    return "\n".join([f":::{{table}} {caption}", ":class: results", "", *lines, ":::"])


def _escaped(text: str) -> str:
    return "".join(f"\\{letter}" if letter in "|*_`<[$" else letter for letter in text)


def _show(app: Sphinx, name: str, source: list[str]) -> None:
    if name == PAGE:
        source[0] = page_of([read_results(file) for file in sorted((BENCHMARKS / "results").glob("*.json"))])


def _always_again(
    app: Sphinx, env: BuildEnvironment, added: set[str], changed: set[str], removed: set[str]
) -> list[str]:
    """Has the page made again in each build, as files may have come, changed or gone."""
    return [PAGE]


def setup(app: Sphinx) -> dict[str, bool]:
    """Connects what makes the page."""
    app.connect("source-read", _show, priority=400)  # before links are led to the site's pages
    app.connect("env-get-outdated", _always_again)
    return {"parallel_read_safe": True}
