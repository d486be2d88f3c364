"""The pictures of a tuning as SVG: the choices that were tried, and training beside float32."""

import math
from collections.abc import Iterator, Sequence

from jmp_train.policies.pages import svg
from jmp_train.tuning.evidence import FrontPoint

_HEIGHT = 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 985, 30, 255
_TICKS = 5
_LEAST_SHARE = 0.5  # in half precision: what is below, such as all in float32, would press the rest together


def front_picture(front: Sequence[FrontPoint], chosen: FrontPoint | None, tolerance: float) -> str:
    """Returns a figure: the share of the flops in half precision against the gradient's error, on a logarithmic scale.

    Args:
      front: the Pareto front, of which what is mostly in half precision is drawn; where no gradient was measured
        there is no figure.
      chosen: what was found, which is marked.
      tolerance: of the gradient's error, a line; infinite if there is none.
    """
    front = [p for p in front if p.half_flops >= _LEAST_SHARE and p.gradient_error < math.inf]
    points = [*front, *([] if chosen is None else [chosen])]
    errors = [p.gradient_error for p in points if 0 < p.gradient_error < math.inf]
    if not errors:
        return ""
    bounds = [*errors, tolerance] if tolerance < math.inf else errors
    low, high = math.floor(math.log10(min(bounds))), math.ceil(math.log10(max(bounds)))
    high = max(high, low + 1)
    least = min(0.9, math.floor(10 * min(p.half_flops for p in points)) / 10)
    x = svg.linear(least, 1.0, _LEFT, _RIGHT - 10)
    y = svg.logarithmic(low, high, _BOTTOM, _TOP)
    ordered = sorted(front, key=lambda p: p.half_flops)
    parts = [
        *_grid(((10.0**e, f"{10.0**e:.0e}") for e in range(low, high + 1)), y),
        *_below(((v, f"{v:.1%}") for v in _ticks(least, 1.0)), x, "share of the flops in half precision"),
        _line("front", [(x(p.half_flops), y(p.gradient_error)) for p in ordered]),
        *(_dot("point", x(p.half_flops), y(p.gradient_error), 4, _said(p)) for p in ordered),
    ]
    legend = {"point": "tried, the best of their share"}
    if tolerance < math.inf:
        parts.append(_tolerance(y(tolerance), tolerance))
        legend["tolerance"] = "tolerance"
    if chosen is not None:
        parts.append(_dot("chosen", x(chosen.half_flops), y(chosen.gradient_error), 7, f"chosen: {_said(chosen)}"))
        legend = {"chosen": "chosen", **legend}
    return svg.figure(
        "front",
        _HEIGHT,
        "Gradient error and share of the flops in half precision",
        [*parts, *svg.line_legend(legend, _LEFT, 220)],
    )


def loss_picture(float32: Sequence[float], tuned: Sequence[float]) -> str:
    """Returns a figure of two curves: the losses of the same steps in float32 and by the rules.

    Args:
      float32: the losses in float32; without any there is no figure.
      tuned: by the rules, a thinner line on the other. Where a loss is not finite the curve is broken.
    """
    finite = [loss for loss in (*float32, *tuned) if math.isfinite(loss)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    if high == low:
        low, high = low - 1, high + 1
    steps = max(len(float32), len(tuned))
    x = svg.linear(1, max(steps, 2), _LEFT + 5, _RIGHT - 10)
    y = svg.linear(low, high, _BOTTOM, _TOP)
    numbers = sorted({1 + round(i * (steps - 1) / (_TICKS - 1)) for i in range(_TICKS)})
    parts = [
        *_grid(((v, f"{v:.3g}") for v in _ticks(low, high)), y),
        *_below(((n, str(n)) for n in numbers), x, "step"),
        *(_line("float32", run, 5) for run in _finite_runs(float32, x, y)),
        *(_line("tuned", run) for run in _finite_runs(tuned, x, y)),
    ]
    legend = svg.line_legend({"float32": "loss in float32", "tuned": "loss by the rules"}, _LEFT, 220)
    return svg.figure("losses", _HEIGHT, "Losses of the same steps in float32 and by the rules", [*parts, *legend])


def _ticks(low: float, high: float) -> list[float]:
    return [low + i * (high - low) / (_TICKS - 1) for i in range(_TICKS)]


def _grid(ticks: Iterator[tuple[float, str]], y: svg.Scale) -> Iterator[str]:
    for value, text in ticks:
        yield svg.level(y(value), _LEFT, _RIGHT, text)


def _below(ticks: Iterator[tuple[float, str]], x: svg.Scale, title: str) -> Iterator[str]:
    for value, text in ticks:
        yield svg.text(x(value), _BOTTOM + 16, text, "middle")
    yield svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 36, title, "middle")


def _line(name: str, places: Sequence[tuple[float, float]], width: int = 2) -> str:
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
    return f'<path class="{name}" stroke-width="{width}" fill="none" d="M{path}"/>' if len(places) > 1 else ""


def _dot(name: str, x: float, y: float, radius: int, text: str) -> str:
    return f'<circle class="{name}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{svg.title(text)}</circle>'


def _said(point: FrontPoint) -> str:
    share, count = f"{point.half_flops:.1%} of the flops in half precision", point.float32_operations
    operations = f"{count} operation{'s' * (count != 1)} in float32"
    return f"{share}, gradient off by {point.gradient_error:.2g}, {operations}"


def _tolerance(y: float, tolerance: float) -> str:
    return (
        f'<path class="tolerance" stroke-width="2" d="M{_LEFT} {y:.1f}H{_RIGHT}">{svg.title(f"{tolerance:.2g}")}</path>'
    )


def _finite_runs(losses: Sequence[float], x: svg.Scale, y: svg.Scale) -> list[list[tuple[float, float]]]:
    """Returns the places of losses, in pieces between those that are not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for number, loss in enumerate(losses, 1):
        if math.isfinite(loss):
            runs[-1].append((x(number), y(loss)))
        else:
            runs.append([])
    return runs
