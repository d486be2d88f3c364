"""Tables and charts of runs, compared with the first run: metrics, losses, costs, speed, memory and watched updates.

Each run has its own color.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from jmp_train.app.runs import NONFINITE, Run
from jmp_train.steps import WATCHES
from jmp_train.tools import documents as doc
from jmp_train.tools.documents import Cell, Table, with_unit

_DASHES = ("", "10 3", "3 2", "10 3 3 3")  # so that overlapping curves can be told apart
_POINTS = 60  # maximum per loss curve
_SIZE, _MARGINS = (440, 240), (48, 12, 10, 42)


def run_styles(runs: Sequence[Run]) -> dict[str, doc.Style]:
    """Returns the style of each run by its policy."""
    return doc.series_styles((run.policy for run in runs), _DASHES)


def panels(runs: Sequence[Run]) -> list[doc.Chart]:
    """Returns the six charts of a comparison."""
    costs = [run.costs for run in runs]
    saved = [cost.residual_bytes for cost in costs]
    return [
        losses(runs),
        loss_scales(runs),
        _bars(
            "Seconds an epoch, and to compile",
            runs,
            [[_seconds(run.epoch_seconds), _seconds(run.compile_seconds, " to compile")] for run in runs],
        ),
        _bars("Flops in half precision", runs, [[(x.half_flops_share, f"{x.half_flops_share:.1%}")] for x in costs], 1),
        _bars("Saved for the backward pass", runs, [[(0, "none") if size is None else _size(size)] for size in saved]),
        _bars("Parameters, and the whole state", runs, [_state(run) for run in runs]),
    ]


def losses(runs: Sequence[Run]) -> doc.Chart:
    """Returns a chart of training losses, averaged over windows to reduce noise, and of the starts of phases."""
    curves = [_means(run) for run in runs]
    y = doc.log_axis([loss for points in curves for _, loss in points if loss > 0] or [1.0])
    styles = run_styles(runs)
    marks = [doc.curve(styles[run.policy], points) for run, points in zip(runs, curves, strict=True)]
    for run in runs:
        style = replace(styles[run.policy], legend="", width=1, dash="2 2")
        marks += [doc.Polyline(style, [[(phase.start, y.low), (phase.start, y.high)]]) for phase in run.phases[1:]]
    return _over_steps("Training loss", runs, y, marks)


def _means(run: Run) -> list[tuple[float, float]]:
    points = [(step.step, step.loss) for step in run.steps if math.isfinite(step.loss)]
    window = math.ceil(len(points) / _POINTS) or 1
    windows = [points[i : i + window] for i in range(0, len(points), window)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in windows]


def loss_scales(runs: Sequence[Run]) -> doc.Chart:
    """Returns a chart of each loss scale that is not always 1, with a cross at each skip."""
    title = "Loss scale (a cross is a skipped step)"
    marks: list[doc.Mark] = []
    scales: list[float] = []
    styles = run_styles(runs)
    for run in runs:
        if all(step.loss_scale == 1 for step in run.steps) and not run.skipped:
            continue
        scales += [step.loss_scale for step in run.steps if step.loss_scale > 0]
        style = styles[run.policy]
        marks.append(doc.Polyline(style, [_history(run)]))
        marks += [doc.Dot(style, step.step, step.loss_scale, is_cross=True) for step in run.skipped]
    if not marks:
        return _over_steps(
            title, runs, doc.Axis(0, 1), [doc.Label("no run has a loss scale", _last(runs) / 2, 0.5, "middle")]
        )
    return _over_steps(
        title, runs, doc.log_axis(scales or [1.0], lambda scale: f"2^{math.log2(scale):g}", base=2), marks
    )


def _history(run: Run) -> list[tuple[float, float]]:
    """Returns the corners of a step curve of the loss scale."""
    points = [(run.steps[0].step, run.steps[0].loss_scale)]
    for step in run.steps:
        if step.loss_scale != points[-1][1]:
            points += [(step.step, points[-1][1]), (step.step, step.loss_scale)]
    return [*points, (run.steps[-1].step, points[-1][1])]


def _last(runs: Sequence[Run]) -> int:
    return max((step.step for run in runs for step in run.steps[-1:]), default=1)


def _over_steps(title: str, runs: Sequence[Run], y: doc.Axis, marks: Sequence[doc.Mark]) -> doc.Chart:
    x = doc.linear_axis(0, _last(runs), "{:g}".format, title="step", has_grid=False, least_step=1)
    return doc.Chart(title, x, y, marks, _SIZE, _MARGINS)


def _seconds(seconds: float, text: str = "") -> tuple[float, str]:
    return seconds, f"{seconds:.3g} s{text}"


def _size(size: float, text: str = "") -> tuple[float, str]:
    return size, doc.with_unit(size, "B") + text


def _state(run: Run) -> list[tuple[float, str]]:
    """Returns the bytes of parameters and whole state, and of a device's peak if it reports one."""
    bars = [_size(run.costs.params_bytes), _size(run.costs.state_bytes, " in all")]
    return bars + [_size(round(run.memory_mb * 1e6), " peak")] * (run.memory_of == "device")


def _bars(title: str, runs: Sequence[Run], rows: Sequence[Sequence[tuple[float, str]]], most: float = 0) -> doc.Chart:
    """Returns a bar chart in which the bars of each run are below each other, the later ones paler."""
    styles = run_styles(runs)
    drawn = []
    for run, bars in zip(runs, rows, strict=True):
        for place, (value, text) in enumerate(bars):
            style = replace(styles[run.policy], legend="", opacity=(1.0, 0.45, 0.2)[place])
            drawn.append(doc.Row("" if place else run.policy, [doc.Piece(style, value)], text))
    axis = doc.Axis(0, most or max((value for bars in rows for value, _ in bars), default=0) or 1)
    sides = min(12 + 6.2 * max((len(run.policy) for run in runs), default=0), 180), 115
    pitch = min(max(_SIZE[1] / max(len(drawn), 1), 18), 40)
    return doc.bar_chart(title, {"": drawn}, axis, width=_SIZE[0], sides=sides, pitch=pitch)


_COST_NOTE = (
    "saved: what the forward pass of a step leaves for its backward pass; state: parameters, optimizer's and model's"
)
_WATCH_NOTE = (
    "the mean share of the worst group of parameters; lost updates: updates that leave a parameter what it was; "
    "underflow: scaled gradients below the half type's smallest normal number"
)

Column = tuple[str, Sequence[str]]


def runs_table(runs: Sequence[Run], *, has_ranges: bool = False) -> Table:
    """Returns the table of metrics, times, and the last loss and loss scale of each run.

    Args:
      runs: the runs.
      has_ranges: True for the range of an epoch's seconds next to the median.
    """
    titles = metric_titles(shown_metrics(runs))
    measured = [(title, [metric_text(run, name) for run in runs]) for name, title in titles.items()]
    is_measured = "loss" in dict(measured)
    columns: list[Column] = [
        ("s/epoch", [seconds_text(run) if has_ranges else f"{run.epoch_seconds:.2f}" for run in runs]),
        ("compile", [f"{run.compile_seconds:.1f} s" for run in runs]),
        *measured,
        ("train loss" if is_measured else "loss", [f"{run.epochs[-1].loss:.4f}" for run in runs]),
        ("scale", [short_scale(run.epochs[-1].loss_scale) for run in runs]),
        ("skipped", [str(run.epochs[-1].skipped_steps) for run in runs]),
    ]
    if reports_memory(runs):
        columns.append(("memory", [f"{run.memory_mb:.0f} MB" for run in runs]))
    return _table(runs, columns, "runs")


def cost_table(runs: Sequence[Run]) -> Table:
    """Returns the table of a step's costs on any device, with ratios to the first run."""
    costs = [run.costs for run in runs]
    columns: list[Column] = [
        ("flops in half", [f"{cost.half_flops_share:.1%}" for cost in costs]),
        *_sizes("saved", [cost.residual_bytes for cost in costs]),
        ("parameters", [with_unit(cost.params_bytes, "B") for cost in costs]),
        *_sizes("state", [cost.state_bytes for cost in costs]),
    ]
    notes = [*_first(runs), _COST_NOTE]
    if any(cost.exchanged_bytes for cost in costs):
        columns += _sizes("halo", [cost.exchanged_bytes for cost in costs])
        notes.append("halo: what a device sends of its nodes in a step")
    return _table(runs, columns, "costs", "; ".join(notes))


def _sizes(title: str, sizes: Sequence[int | None]) -> list[Column]:
    """Returns a column of sizes and, with several runs, their ratios to the first one."""
    cells = ["none" if size is None else with_unit(size, "B") for size in sizes]
    columns: list[Column] = [(title, cells), ("ratio", [ratio(size, sizes[0]) for size in sizes])]
    return columns if len(sizes) > 1 else columns[:1]


def watch_table(runs: Sequence[Run]) -> Table:
    """Returns the table of the worst group of parameters of each run with `watch`."""
    rows = [
        (name, *(_worst(run.watch.get(watch, {})) for watch in WATCHES))
        for run, name in zip(runs, _names(runs), strict=True)
        if run.watch
    ]
    return Table(("policy", "lost updates", "underflow"), rows, "watches", note=_WATCH_NOTE)


def _worst(groups: Mapping[str, float]) -> str:
    """Returns "12.3% (Dense_0)" for the group with the largest fraction, "0" if all are 0."""
    share, group = max(((share, group) for group, share in groups.items()), default=(0.0, ""))
    return f"{share:.1%} ({group})" if share else "0"


def speed_table(runs: Sequence[Run]) -> Table:
    """Returns the table of speed and device memory, with ratios to the first run.

    If devices do not report their memory, the table omits it, because a process's memory is mostly the compiler's and
    the libraries'.

    Reference: ColossalAI's table of its AMP modes.
    """
    first, several = runs[0], len(runs) > 1
    speeds = [run.iterations_per_second for run in runs]
    columns: list[Column] = [
        ("iterations/s", [_rate(speed) for speed in speeds]),
        ("samples/s", ["" if run.samples_per_second is None else _rate(run.samples_per_second) for run in runs]),
    ]
    if not reports_memory(runs):  # a CPU, whose times differ much
        columns.append(("s/epoch", [seconds_text(run) for run in runs]))
    columns += [("speed-up", [ratio(speed, speeds[0]) for speed in speeds])] * several
    if reports_memory(runs):
        columns.append(("memory", [f"{run.memory_mb:.0f} MB" for run in runs]))
        columns += [("memory ratio", [ratio(run.memory_mb, first.memory_mb) for run in runs])] * several
    return _table(runs, columns, "speed", "".join(_first(runs)), "run")


def _table(runs: Sequence[Run], columns: Sequence[Column], name: str, note: str = "", head: str = "policy") -> Table:
    """Returns a table with a row per run, which begins with the policy's name in the color of the charts."""
    heads, cells = zip((head, _names(runs)), *columns, strict=True)
    return Table(heads, list(zip(*cells, strict=True)), name, note=note)


def _names(runs: Sequence[Run]) -> list[Cell]:
    styles = run_styles(runs)
    return [Cell(run.policy, color=styles[run.policy].color) for run in runs]


def _first(runs: Sequence[Run]) -> list[str]:
    """Returns the label of the first run in ratios; empty for a single run."""
    return [f"1.00x: {runs[0].policy}"] if len(runs) > 1 else []


def seconds_text(run: Run) -> str:
    """Returns the median epoch's seconds and, for several epochs, the minimum and the maximum."""
    seconds = [epoch.seconds for epoch in run.epochs]
    if len(seconds) == 1:
        return f"{seconds[0]:.2f}"
    return f"{run.epoch_seconds:.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def is_on_cpu(runs: Sequence[Run]) -> bool:
    """Returns True if a run was on a CPU, where times say little about half precision."""
    return any(run.device.endswith("cpu") for run in runs)


def reports_memory(runs: Sequence[Run]) -> bool:
    """Returns True if all runs report the peak memory of their device."""
    return all(run.memory_of == "device" for run in runs)


def process_memory(runs: Sequence[Run]) -> str:
    """Returns a footnote with the peak memory of processes; "" if all runs report that of their device."""
    peaks = ", ".join(f"{run.policy} {run.memory_mb:.0f} MB" for run in runs if run.memory_of != "device")
    return peaks and f"peak memory of the process, with libraries, compiler and data: {peaks}"


def ratio(value: float | None, first: float | None) -> str:
    """Returns a number as a multiple of the first run's; "" if the number is None or the first is None or 0."""
    return f"{value / first:.2f}x" if value is not None and first else ""


def short_scale(scale: float) -> str:
    """Returns a loss scale in few characters; powers of two from a million on as "2^n".

    Example:
      >>> short_scale(65536.0), short_scale(2.0**21)
      ('65536', '2^21')
    """
    fraction, exponent = math.frexp(scale)
    return f"2^{exponent - 1}" if scale >= 1e6 and fraction == 0.5 else f"{scale:g}"


def _rate(number: float) -> str:
    return f"{number:.1f}" if number >= 10 else f"{number:.3g}"


def shown_metrics(runs: Sequence[Run]) -> list[str]:
    """Returns the names of the metrics in tables, the headline first."""
    return [name for name in dict.fromkeys(name for run in runs for name in run.metrics) if name != NONFINITE]


def metric_text(run: Run, name: str) -> str:
    """Returns a run's metric in few characters, accuracies as percentages; "" if the run lacks the metric."""
    value = run.metrics.get(name, "")
    if isinstance(value, int | str) and not isinstance(value, bool):
        return str(value)
    if "accuracy" in name and 0 <= value <= 1:
        return f"{value:.2%}"
    return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 or value == 0 else f"{value:.4g}"


def metric_titles(names: Sequence[str]) -> dict[str, str]:
    """Returns the titles of metrics; those that would share one keep their names.

    Example:
      >>> metric_titles(["f1_macro", "f1_micro", "f1 micro"])
      {'f1_macro': 'f1 macro', 'f1_micro': 'f1_micro', 'f1 micro': 'f1 micro'}
    """
    titles = [metric_title(name) for name in names]
    return {name: title if titles.count(title) == 1 else name for name, title in zip(names, titles, strict=True)}


def metric_title(name: str) -> str:
    """Returns a metric's name as a title.

    Example:
      >>> metric_title("test_accuracy"), metric_title("bits_per_byte")
      ('test accuracy', 'bits/byte')
    """
    return name.replace("_per_", "/").replace("_", " ")
