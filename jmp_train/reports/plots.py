"""Plots of a comparison: losses, loss scales, costs and times of the runs, drawn by matplotlib.

A run keeps one color and one dash in all panels. The same panels make report.png, six in one, and
report.html, each by itself and in the page's own text color.
"""

import io
import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jmp_train.extras import extra_packages
from jmp_train.reports.comparison import in_bytes, process_memory
from jmp_train.runs import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Paul Tol's "bright" scheme: told apart by the color-blind, and seen on white and on black.
COLORS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb")
_DASHES = ("-", (0, (5, 1.5)), (0, (1.5, 1)), "-.")  # so that runs on top of each other are seen
_INK = "#525354"  # of text and axes; a page puts its own text color in its place
_POINTS = 60  # that a loss curve has at most

Panel = Callable[["Axes", Sequence[Run]], None]


def color(index: int) -> str:
    """Returns the color of the run with that index."""
    return COLORS[index % len(COLORS)]


def draw_losses(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draws the training losses, averaged over windows because single batches differ much, and where phases begin."""
    for index, run in enumerate(runs):
        points = [(step.step, step.loss) for step in run.steps if math.isfinite(step.loss)]
        window = math.ceil(len(points) / _POINTS)
        windows = [points[i : i + window] for i in range(0, len(points), window or 1)]
        means = [[sum(axis) / len(part) for axis in zip(*part, strict=True)] for part in windows]
        if means:
            axes.plot(*zip(*means, strict=True), label=run.policy, **_line(index))
        for phase in run.phases[1:]:
            axes.axvline(phase.start, color=color(index), linestyle=":", linewidth=1)
    axes.set_title("Training loss")
    axes.set_xlabel("step")
    axes.set_yscale("log")
    _legend(axes)


def draw_loss_scales(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draws the history of each loss scale that is not 1 throughout, with a cross at each skip."""
    axes.set_title("Loss scale (a cross is a skipped step)")
    axes.set_xlabel("step")
    for index, run in enumerate(runs):
        scales = [(step.step, step.loss_scale) for step in run.steps]
        crosses = [(step.step, step.loss_scale) for step in run.skipped]
        if any(scale != 1 for _, scale in scales) or crosses:
            axes.plot(
                *zip(*scales, strict=True),
                label=run.policy,
                drawstyle="steps-post",
                **_line(index),
            )
        if crosses:
            axes.plot(*zip(*crosses, strict=True), "x", color=color(index), markersize=8)
    if not axes.lines:
        axes.text(0.5, 0.5, "no run has a loss scale", ha="center", transform=axes.transAxes)
        axes.set_axis_off()
        return
    axes.set_yscale("log", base=2)
    _legend(axes)


def draw_seconds(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draws the median epoch's time, and apart from it that of compilation."""
    axes.set_title("Seconds an epoch, and to compile")
    for index, run in enumerate(runs):
        _bar(axes, index - 0.19, run.epoch_seconds, f"{run.epoch_seconds:.3g} s", index, 0.36)
        text = f"{run.compile_seconds:.3g} s to compile"
        _bar(axes, index + 0.19, run.compile_seconds, text, index, 0.36, alpha=0.45)
    _name_bars(axes, runs)


def draw_half_flops(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draws which share of a step's floating-point operations runs in half precision."""
    axes.set_title("Flops in half precision")
    for index, run in enumerate(runs):
        share = run.costs.half_flops_share
        _bar(axes, index, share, f"{share:.1%}", index, 0.6)
    axes.set_xlim(0, 1)
    _name_bars(axes, runs)


def draw_saved(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draws the bytes that a step's forward pass leaves for its backward pass."""
    axes.set_title("Saved for the backward pass")
    for index, run in enumerate(runs):
        saved = run.costs.residual_bytes
        _bar(axes, index, saved or 0, "none" if saved is None else in_bytes(saved), index, 0.6)
    _name_bars(axes, runs)


def draw_state(axes: "Axes", runs: Sequence[Run]) -> None:
    """Draws the bytes of parameters and of the whole state, and a device's peak where it reports one."""
    axes.set_title("Parameters, and the whole state")
    for index, run in enumerate(runs):
        bars: list[tuple[float, str, float]] = [
            (run.costs.params_bytes, "", 1.0),
            (run.costs.state_bytes, " in all", 0.45),
        ]
        if run.memory_of == "device":
            bars.append((run.memory_mb * 1e6, " peak", 0.2))
        height = 0.72 / len(bars)
        for place, (size, text, alpha) in enumerate(bars):
            y = index + height * (place - (len(bars) - 1) / 2)
            _bar(axes, y, size, in_bytes(round(size)) + text, index, 0.95 * height, alpha)
    _name_bars(axes, runs)


PANELS: dict[str, Panel] = {
    "losses": draw_losses,
    "loss_scales": draw_loss_scales,
    "seconds": draw_seconds,
    "half_flops": draw_half_flops,
    "saved": draw_saved,
    "state": draw_state,
}


def png(task: str, runs: Sequence[Run]) -> bytes:
    """Returns the six panels as one PNG.

    Args:
      task: the task's name.
      runs: at least one.
    """
    figure = _figure(15, 7.5)
    figure.suptitle(f"{task} on {' and '.join(dict.fromkeys(run.device for run in runs))}")
    for axes, draw in zip(figure.subplots(2, 3).flat, PANELS.values(), strict=True):
        _draw(axes, draw, runs)
    if footnote := process_memory(runs):
        figure.supxlabel(footnote, fontsize="small", color=_INK)
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=120)
    return file.getvalue()


def svg(name: str, runs: Sequence[Run]) -> str:
    """Returns a panel as an SVG element for a page, in the page's text color.

    Args:
      name: one of `PANELS`; it begins all of the element's ids.
      runs: at least one.
    """
    with extra_packages():
        import matplotlib

    figure = _figure(4.4, 3.2)
    axes = figure.subplots()
    _draw(axes, PANELS[name], runs)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=nothing)
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r'((?:id="|href="#|url\(#))', rf"\1{name}-", text)
    label = axes.get_title()
    return text.replace("<svg", f'<svg role="img" aria-label="{label}"', 1)


def _figure(width: float, height: float) -> "Figure":
    with extra_packages():
        from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _draw(axes: "Axes", draw: Panel, runs: Sequence[Run]) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    draw(axes, runs)
    axes.title.set_color(_INK)
    axes.xaxis.label.set_color(_INK)
    axes.tick_params(which="both", colors=_INK)
    for spine in axes.spines.values():
        spine.set_color(_INK)
    for text in axes.texts:
        text.set_color(_INK)


def _line(index: int) -> dict[str, Any]:
    return {"color": color(index), "linestyle": _DASHES[index % len(_DASHES)], "linewidth": 2}


def _legend(axes: "Axes") -> None:
    if axes.lines:
        axes.legend(frameon=False, labelcolor=_INK, handlelength=3)


def _bar(axes: "Axes", y: float, value: float, text: str, index: int, height: float, alpha: float = 1.0) -> None:
    axes.barh(y, value, height, color=color(index), alpha=alpha)
    axes.annotate(text, (value, y), (4, 0), textcoords="offset points", va="center")


def _name_bars(axes: "Axes", runs: Sequence[Run]) -> None:
    axes.set_yticks(range(len(runs)), [run.policy for run in runs])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.55 * axes.get_xlim()[1])  # room for the texts beside the bars
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
