"""Charts of a comparison: losses, loss scales, costs and times. A run has the same color in all charts."""

import math
from collections.abc import Sequence

from jmp_train.policies.documents import (
    Axis,
    Chart,
    Dot,
    Label,
    Mark,
    Path,
    Row,
    Style,
    bar_chart,
    log_axis,
    round_ticks,
    series_color,
    with_unit,
)
from jmp_train.runs import Run

_DASHES = ("", "10 3", "3 2", "10 3 3 3")  # so that overlapping curves can be told apart
_POINTS = 60  # maximum per loss curve
_SIZE, _MARGINS = (440, 240), (48, 12, 10, 42)


def panels(runs: Sequence[Run]) -> list[Chart]:
    """Returns the six charts of a comparison."""
    return [losses(runs), loss_scales(runs), seconds(runs), half_flops(runs), saved(runs), state(runs)]


def losses(runs: Sequence[Run]) -> Chart:
    """Returns a chart of training losses, averaged over windows to reduce noise, and of the starts of phases."""
    curves = {f"run{number}": _means(run) for number, run in enumerate(runs)}
    y = log_axis([loss for curve in curves.values() for _, loss in curve if loss > 0] or [1.0])
    marks: list[Mark] = [Path(name, [curve]) for name, curve in curves.items() if curve]
    styles = _styles(runs)
    for number, run in enumerate(runs):
        for phase in run.phases[1:]:
            styles[f"phase{number}"] = Style(series_color(number), width=1, dash="2 2")
            marks.append(Path(f"phase{number}", [[(phase.start, y.low), (phase.start, y.high)]]))
    return _curves("losses", "Training loss", runs, y, styles, marks)


def _means(run: Run) -> list[tuple[float, float]]:
    points = [(step.step, step.loss) for step in run.steps if math.isfinite(step.loss)]
    window = math.ceil(len(points) / _POINTS) or 1
    windows = [points[i : i + window] for i in range(0, len(points), window)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in windows]


def loss_scales(runs: Sequence[Run]) -> Chart:
    """Returns a chart of each loss scale that is not always 1, with a cross at each skip."""
    marks: list[Mark] = []
    drawn, scales = [], []
    for number, run in enumerate(runs):
        if all(step.loss_scale == 1 for step in run.steps) and not run.skipped:
            continue
        drawn.append(run)
        scales += [step.loss_scale for step in run.steps if step.loss_scale > 0]
        marks.append(Path(f"run{number}", [_history(run)]))
        marks += [Dot(f"run{number}", step.step, step.loss_scale, is_cross=True) for step in run.skipped]
    y = log_axis(scales or [1.0], lambda scale: f"2^{math.log2(scale):g}", base=2)
    if not marks:
        y = Axis(y.low, y.high)
        marks = [Label("no run has a loss scale", _last_step(runs) / 2, 1.0, "middle")]
    styles = {name: style for name, style in _styles(runs).items() if style.legend in [run.policy for run in drawn]}
    return _curves("loss_scales", "Loss scale (a cross is a skipped step)", runs, y, styles, marks)


def _history(run: Run) -> list[tuple[float, float]]:
    """Returns the corners of a step curve of the loss scale."""
    points = [(run.steps[0].step, run.steps[0].loss_scale)]
    for step in run.steps:
        if step.loss_scale != points[-1][1]:
            points += [(step.step, points[-1][1]), (step.step, step.loss_scale)]
    return [*points, (run.steps[-1].step, points[-1][1])]


def seconds(runs: Sequence[Run]) -> Chart:
    """Returns a chart of the median epoch's time and the compile time."""
    rows = [
        [
            (run.epoch_seconds, f"{run.epoch_seconds:.3g} s"),
            (run.compile_seconds, f"{run.compile_seconds:.3g} s to compile"),
        ]
        for run in runs
    ]
    return _bars("seconds", "Seconds an epoch, and to compile", runs, rows)


def half_flops(runs: Sequence[Run]) -> Chart:
    """Returns a chart of the fraction of a step's flops that runs in half precision."""
    rows = [[(run.costs.half_flops_share, f"{run.costs.half_flops_share:.1%}")] for run in runs]
    return _bars("half_flops", "Flops in half precision", runs, rows, most=1)


def saved(runs: Sequence[Run]) -> Chart:
    """Returns a chart of the bytes that a step stores for its backward pass."""
    sizes = [run.costs.residual_bytes for run in runs]
    rows = [[(0, "none") if size is None else (size, with_unit(size, "B"))] for size in sizes]
    return _bars("saved", "Saved for the backward pass", runs, rows)


def state(runs: Sequence[Run]) -> Chart:
    """Returns a chart of the bytes of parameters and whole state, and of a device's peak if it reports one."""
    rows = []
    for run in runs:
        sizes = {"": run.costs.params_bytes, " in all": run.costs.state_bytes}
        if run.memory_of == "device":
            sizes[" peak"] = round(run.memory_mb * 1e6)
        rows.append([(size, with_unit(size, "B") + text) for text, size in sizes.items()])
    return _bars("state", "Parameters, and the whole state", runs, rows)


def _styles(runs: Sequence[Run]) -> dict[str, Style]:
    return {
        f"run{number}": Style(series_color(number), run.policy, dash=_DASHES[number % len(_DASHES)])
        for number, run in enumerate(runs)
    }


def _last_step(runs: Sequence[Run]) -> int:
    return max((step.step for run in runs for step in run.steps[-1:]), default=1)


def _curves(
    name: str, title: str, runs: Sequence[Run], y: Axis, styles: dict[str, Style], marks: Sequence[Mark]
) -> Chart:
    last = _last_step(runs)
    x = Axis(0, last, [(step, f"{step:g}") for step in round_ticks(last, 5)], "step", has_grid=False)
    return Chart(name, title, x, y, styles, marks, title, _SIZE, _MARGINS)


def _bars(
    name: str, title: str, runs: Sequence[Run], rows: Sequence[Sequence[tuple[float, str]]], most: float = 0
) -> Chart:
    """Returns a bar chart in which the bars of each run are below each other, the later ones paler."""
    styles = {
        f"run{number} bar{place}": Style(series_color(number), opacity=(1.0, 0.45, 0.2)[place])
        for number, bars in enumerate(rows)
        for place in range(len(bars))
    }
    drawn = [
        Row("" if place else run.policy, [(f"run{number} bar{place}", value, "")], text)
        for number, (run, bars) in enumerate(zip(runs, rows, strict=True))
        for place, (value, text) in enumerate(bars)
    ]
    axis = Axis(0, most or max((value for bars in rows for value, _ in bars), default=0) or 1)
    sides = min(12 + 6.2 * max((len(run.policy) for run in runs), default=0), 180), 115
    pitch = min(max(_SIZE[1] / max(len(drawn), 1), 18), 40)
    return bar_chart(name, title, {"": drawn}, axis, styles, title=title, width=_SIZE[0], sides=sides, pitch=pitch)
