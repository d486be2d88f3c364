"""Charts of a tuning: the tried choices, and training compared with float32."""

import math
from collections.abc import Sequence

from jmp_train.policies.documents import Axis, Chart, Dot, Mark, Path, Style, counted, even_ticks, log_axis
from jmp_train.tuning.evidence import FrontPoint

_LEAST_SHARE = 0.5  # in half precision: points below, such as all in float32, would compress the rest


def front_chart(front: Sequence[FrontPoint], chosen: FrontPoint | None, tolerance: float) -> Chart | None:
    """Returns a chart of gradient error (logarithmic) over the fraction of flops in half precision.

    Args:
      front: the Pareto front. Points mostly in float32 are omitted. Without any gradient error, the result is None.
      chosen: the choice of tuning.
      tolerance: tolerance of the gradient's error, drawn as a line; infinite for no line.
    """
    front = [p for p in front if p.half_flops >= _LEAST_SHARE and p.gradient_error < math.inf]
    points = [*front, *([] if chosen is None else [chosen])]
    errors = [p.gradient_error for p in points if 0 < p.gradient_error < math.inf]
    if not errors:
        return None
    least = min(0.9, math.floor(10 * min(p.half_flops for p in points)) / 10)
    ticks = [(x, f"{x:.1%}") for x in even_ticks(least, 1.0)]
    ordered = sorted(front, key=lambda p: p.half_flops)
    styles = {"point": Style("first", "tried, the best of their share"), "front": Style("first")}
    marks: list[Mark] = [Path("front", [[(p.half_flops, p.gradient_error) for p in ordered]])]
    marks += [Dot("point", p.half_flops, p.gradient_error, title=_said(p)) for p in ordered]
    if tolerance < math.inf:
        errors.append(tolerance)
        styles["tolerance"] = Style("bad", "tolerance", dash="6 4")
        marks.append(Path("tolerance", [[(least, tolerance), (1.0, tolerance)]], f"{tolerance:.2g}"))
    if chosen is not None:
        styles["chosen"] = Style("second", "chosen")
        marks.append(Dot("chosen", chosen.half_flops, chosen.gradient_error, 7, f"chosen: {_said(chosen)}"))
    label = "Gradient error and share of the flops in half precision"
    x = Axis(least, 1.0, ticks, "share of the flops in half precision", has_grid=False)
    return Chart("front", label, x, log_axis(errors, "{:.0e}".format), styles, marks)


def loss_chart(float32: Sequence[float], tuned: Sequence[float]) -> Chart | None:
    """Returns a chart of the losses of the same steps in float32 and with the rules; None without losses.

    Args:
      float32: losses in float32.
      tuned: losses with the rules, a thinner line. Curves have gaps at losses that are not finite.
    """
    finite = [loss for loss in (*float32, *tuned) if math.isfinite(loss)]
    if not finite:
        return None
    low, high = min(finite), max(finite)
    if high == low:
        low, high = low - 1, high + 1
    steps = max(len(float32), len(tuned))
    numbers = sorted({round(number) for number in even_ticks(1, steps)})
    x = Axis(1, max(steps, 2), [(number, str(number)) for number in numbers], "step", has_grid=False)
    y = Axis(low, high, [(loss, f"{loss:.3g}") for loss in even_ticks(low, high)])
    styles = {"float32": Style("first", "loss in float32", 5), "tuned": Style("second", "loss by the rules")}
    marks = [Path(name, [run]) for name, losses in (("float32", float32), ("tuned", tuned)) for run in _runs(losses)]
    return Chart("losses", "Losses of the same steps in float32 and by the rules", x, y, styles, marks)


def _said(point: FrontPoint) -> str:
    share = f"{point.half_flops:.1%} of the flops in half precision"
    operations = counted(point.float32_operations, "operation")
    return f"{share}, gradient off by {point.gradient_error:.2g}, {operations} in float32"


def _runs(losses: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Returns steps and losses, split at losses that are not finite."""
    runs: list[list[tuple[float, float]]] = [[]]
    for number, loss in enumerate(losses, 1):
        if math.isfinite(loss):
            runs[-1].append((number, loss))
        else:
            runs.append([])
    return runs
