"""report.html: a comparison as a page."""

import math
from collections.abc import Sequence

import jax

from jmp_train.policies import documents
from jmp_train.policies.documents import Cell, Items, Panels, Section, Table, Text, series_color
from jmp_train.reports.charts import panels
from jmp_train.reports.notes import explanations, sentences
from jmp_train.reports.tables import (
    cost_table,
    is_on_cpu,
    metric_cells,
    metric_title,
    process_memory,
    seconds_text,
    short_scale,
    shown_metrics,
    speed_table,
    watch_table,
)
from jmp_train.runs import Epoch, Run

_SECONDS = "An epoch's seconds are of training alone, without compilation and test; the table has the median."
_ON_CPU = (
    "XLA computes most of half precision in float32 on CPUs, so that it saves little time there; what a step saves "
    "for its backward pass and what is in half are the program's, on any device."
)


def page(task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the page as HTML.

    Args:
      task: the task's name.
      runs: at least one; the others are compared with the first.
      failures: (policy, reason) of each failed run.
    """
    said = [Text(text) for text in (*sentences(runs), *explanations(runs))]
    failed = [Text(f"{policy} did not end: {reason}", look="failed") for policy, reason in failures]
    costs, watched = cost_table(runs), watch_table(runs)
    tables = [_runs_table(runs), costs, speed_table(runs), watched]
    colors = {run.policy: series_color(number)[0] for number, run in enumerate(runs)}
    return documents.page(
        f"{task}: {' / '.join(colors)}",
        [
            Items([*said, *failed], "summary"),
            *(_dotted(table, colors) for table in tables),
            Text(_sentence(watched.note) if watched.rows else "", look="soft"),
            Panels(panels(runs)),
            *map(_epochs, runs),
        ],
        [_footer(runs, _sentence(costs.note))],
    )


def _footer(runs: Sequence[Run], costs: str) -> str:
    devices = " and ".join(dict.fromkeys(run.device for run in runs))
    memory = process_memory(runs)
    parts = [
        f"On {devices} with jax {jax.__version__}. {_SECONDS}",
        f"Ratios are those to {runs[0].policy}." if len(runs) > 1 else "",
        costs,
        _ON_CPU if is_on_cpu(runs) else "",
        _sentence(memory) if memory else "",
    ]
    return " ".join(filter(None, parts))


def _runs_table(runs: Sequence[Run]) -> Table:
    names = shown_metrics(runs)
    heads = ("policy", *map(metric_title, names), "s/epoch", "compile", "last loss", "last scale", "skipped steps")
    rows = [
        (
            run.policy,
            *metric_cells(run, names),
            seconds_text(run),
            f"{run.compile_seconds:.1f} s",
            *_state(run.epochs[-1]),
        )
        for run in runs
    ]
    return Table(heads, rows, "runs")


def _state(epoch: Epoch) -> tuple[str, str, str]:
    return f"{epoch.loss:.4f}", short_scale(epoch.loss_scale), str(epoch.skipped_steps)


def _dotted(table: Table, colors: dict[str, str]) -> Table:
    """Returns the table with the color of each run before its name."""
    rows = [(Cell(str(name), color=colors[str(name)]), *cells) for name, *cells in table.rows]
    return Table(table.heads, rows, table.name)


def _sentence(note: str) -> str:
    return f"{note[:1].upper()}{note[1:]}."


def _epochs(run: Run) -> Section:
    rows = []
    for epoch in run.epochs:
        rate = "" if math.isnan(epoch.learning_rate) else f"{epoch.learning_rate:.2e}"
        loss, *rest = _state(epoch)
        rows.append((str(epoch.epoch), loss, rate, f"{epoch.seconds:.2f}", *rest))
    heads = ("epoch", "loss", "learning rate", "seconds", "scale", "skipped")
    return Section(f"{run.policy}, epoch by epoch", [Table(heads, rows)], is_folded=True)
