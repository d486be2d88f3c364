"""Charts of a comparison: losses, loss scales, costs and times. Each run has its own color."""

import math
from collections.abc import Sequence
from dataclasses import replace

from jmp_train.app.runs import Run
from jmp_train.tools import documents as doc

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
