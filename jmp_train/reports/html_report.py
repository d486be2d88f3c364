"""report.html: a comparison as one page without scripts or network access."""

import math
from collections.abc import Sequence
from html import escape
from string import Template

import jax

from jmp_train.reports.comparison import (
    WATCH_NOTE,
    WATCH_TITLES,
    cost_table,
    explanations,
    in_bytes,
    is_on_cpu,
    metric_cells,
    metric_title,
    metrics_note,
    process_memory,
    ratio,
    seconds_text,
    short_scale,
    shown_metrics,
    speed_table,
    watch_rows,
)
from jmp_train.reports.plots import PANELS, color, svg
from jmp_train.runs import Epoch, Run

_PAGE = Template("""\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #202124; --soft: #5f6368; --page: #fff; --line: #dadce0; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --soft: #9aa0a6; --page: #18191b; --line: #3c4043; }
}
body { margin: 0 auto; max-width: 72rem; padding: 1rem; background: var(--page);
  color: var(--ink); font: 1rem/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0.5rem 0; }
p, footer { color: var(--soft); }
ul { padding-left: 1.2rem; }
.panels { display: grid; gap: 1rem; margin: 2rem 0 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.panels svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
.scroll + .scroll { margin-top: 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; white-space: nowrap; }
th, td { padding: 0.35rem 0.8rem 0.35rem 0; text-align: right; border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; }
.dot { display: inline-block; width: 0.7em; height: 0.7em; border-radius: 50%; margin-right: 0.4em; }
.failed { color: #d93025; }
summary { cursor: pointer; padding: 0.4rem 0; }
footer { font-size: 0.85rem; margin-top: 2rem; }
</style>
</head>
<body>
<h1>$title</h1>
<ul id="summary">
$summary
</ul>
<div class="scroll">
<table id="runs">
<thead><tr>$titles</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
<div class="scroll">
<table id="costs">
<thead><tr>$cost_titles</tr></thead>
<tbody>
$cost_rows
</tbody>
</table>
</div>
<div class="scroll">
<table id="speed">
<thead><tr>$speed_titles</tr></thead>
<tbody>
$speed_rows
</tbody>
</table>
</div>
$watches
<div class="panels">
$panels
</div>
$epochs
<footer>On $devices with jax $version. An epoch's seconds are of training alone, without compilation
and test; the table has the median. $ratios$cost_note.$footnote</footer>
</body>
</html>
""")

_ON_CPU = (
    " XLA computes most of half precision in float32 on CPUs, so that it saves little time there; what a step saves "
    "for its backward pass and what is in half are the program's, on any device."
)


def page(task: str, runs: Sequence[Run], failures: Sequence[tuple[str, str]] = ()) -> str:
    """Returns the page.

    Args:
      task: the task's name.
      runs: at least one; the others are compared with the first.
      failures: (policy, reason) of each run that did not end.
    """
    failed = [f'<li class="failed">{escape(policy)} did not end: {escape(reason)}</li>' for policy, reason in failures]
    said = [*sentences(runs), *explanations(runs)]
    speed_titles, speed_rows = speed_table(runs)
    cost_titles, costs, cost_note = cost_table(runs)
    cost_note = cost_note.removeprefix(f"1.00x: {runs[0].policy}; ")
    names = shown_metrics(runs)
    titles = ("policy", *map(metric_title, names), "s/epoch", "compile", "last loss", "last scale", "skipped steps")
    return _PAGE.substitute(
        title=f"{escape(task)}: {escape(' / '.join(run.policy for run in runs))}",
        summary="\n".join([f"<li>{escape(text)}</li>" for text in said] + failed),
        titles=_titles(titles),
        rows="\n".join(_row(index, run, names) for index, run in enumerate(runs)),
        cost_titles=_titles(cost_titles),
        cost_rows=_named_rows(costs),
        cost_note=escape(cost_note[:1].upper() + cost_note[1:]),
        ratios=f"Ratios are those to {escape(runs[0].policy)}. " if len(runs) > 1 else "",
        speed_titles=_titles(speed_titles),
        speed_rows=_named_rows(speed_rows),
        watches=_watches(runs),
        panels="\n".join(f'<div class="panel">{svg(name, runs)}</div>' for name in PANELS),
        epochs="\n".join(_epochs(run) for run in runs),
        devices=escape(" and ".join(dict.fromkeys(run.device for run in runs))),
        version=jax.__version__,
        footnote=_footnote(runs),
    )


def _footnote(runs: Sequence[Run]) -> str:
    on_cpu = _ON_CPU if is_on_cpu(runs) else ""
    memory = process_memory(runs)
    return escape(f"{on_cpu} {memory[:1].upper()}{memory[1:]}." if memory else on_cpu)


def sentences(runs: Sequence[Run]) -> list[str]:
    """Returns a sentence a run that says what it costs and gains; the first is what they are beside.

    Args:
      runs: at least one.
    """
    first, *others = runs
    head = f"{first.policy}: {metrics_note(first)}, {first.epoch_seconds:.3g} s per epoch{_saved(first)}."
    return [head, *(_sentence(run, first) for run in others)]


def _saved(run: Run) -> str:
    saved = run.costs.residual_bytes
    return "" if saved is None else f", {in_bytes(saved)} saved for the backward pass"


def _sentence(run: Run, first: Run) -> str:
    times = ratio(run.costs.residual_bytes, first.costs.residual_bytes)
    beside = f" ({times})" if times else ""
    speed = f"{first.epoch_seconds / run.epoch_seconds:.2f} times as fast as {first.policy}, "
    return (
        f"{run.policy}: {metrics_note(run, first)}, {'' if is_on_cpu([run, first]) else speed}"
        f"{run.costs.half_flops_share:.1%} of the flops in half precision{_saved(run)}{beside}; "
        f"{len(run.skipped)} of {len(run.steps)} steps skipped."
    )


def _row(index: int, run: Run, names: Sequence[str]) -> str:
    last = run.epochs[-1]
    cells = (
        *metric_cells(run, names),
        seconds_text(run),
        f"{run.compile_seconds:.1f} s",
        f"{last.loss:.4f}",
        short_scale(last.loss_scale),
        f"{last.skipped_steps}",
    )
    return _named_row(index, run.policy, [escape(cell) for cell in cells])


def _watches(runs: Sequence[Run]) -> str:
    """Returns the table of what runs watched, with its note; "" if none did."""
    rows = [
        _named_row(index, run.policy, [escape(cell) for cell in cells])
        for index, run in enumerate(runs)
        for _, *cells in watch_rows([run])
    ]
    if not rows:
        return ""
    body = "\n".join(rows)
    return (
        f'<div class="scroll">\n<table id="watches">\n<thead><tr>{_titles(WATCH_TITLES)}</tr></thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table>\n</div>\n<p>{escape(WATCH_NOTE.capitalize())}.</p>"
    )


def _titles(titles: Sequence[str]) -> str:
    return "".join(f"<th>{escape(title)}</th>" for title in titles)


def _named_rows(rows: Sequence[Sequence[str]]) -> str:
    """Returns rows whose first cell is the run's name."""
    return "\n".join(_named_row(i, name, cells) for i, (name, *cells) in enumerate(rows))


def _named_row(index: int, name: str, cells: Sequence[str]) -> str:
    """Returns a row that begins with a run's name and color."""
    dot = f'<span class="dot" style="background:{color(index)}"></span>'
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in (dot + escape(name), *cells)) + "</tr>"


def _rate(epoch: Epoch) -> str:
    return "" if math.isnan(epoch.learning_rate) else f"{epoch.learning_rate:.2e}"


def _epochs(run: Run) -> str:
    titles = ("epoch", "loss", "learning rate", "seconds", "scale", "skipped")
    head = _titles(titles)
    body = "\n".join(
        f"<tr><td>{e.epoch}</td><td>{e.loss:.4f}</td><td>{_rate(e)}</td>"
        f"<td>{e.seconds:.2f}</td><td>{short_scale(e.loss_scale)}</td>"
        f"<td>{e.skipped_steps}</td></tr>"
        for e in run.epochs
    )
    return (
        f"<details><summary>{escape(run.policy)}, epoch by epoch</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n'
        "</tbody></table></div></details>"
    )
