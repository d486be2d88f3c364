"""The roofline of a GPU as SVG: peak rates and bandwidth, whole steps at their bounds, costliest kernels."""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from jmp_train.aot import GPU
from jmp_train.planning.kernels import Kernels, costliest_first
from jmp_train.planning.rows import PlanRow, milliseconds, with_unit
from jmp_train.policies.pages import svg

_HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 360, 70, 810, 16, 305
_KERNELS = 25  # of a row
_SHOWN_ALWAYS = ("float32", "tfloat32", "bfloat16", "float16")
_RATE_OF = {"f64": "float64", "c128": "float64", "s8": "int8", "u8": "int8"}  # which others are shown only if used


@dataclass(frozen=True)
class Point:
    """What is drawn of a step or a kernel.

    Attributes:
      intensity: operations for each byte that is read or written.
      rate: operations a second at the bound.
      rate_without_cache: the same if all bytes come from and go to the memory.
      share: of the step's bound, 1 for the step itself.
      said: in words.
    """

    intensity: float
    rate: float
    rate_without_cache: float
    share: float
    said: str


def roofline_picture(gpu: GPU, rows: Sequence[PlanRow], classes: Mapping[str, str], name: str) -> str:
    """Returns a figure: arithmetic intensity against operations a second; empty if no row has matrix products.

    Args:
      gpu: whose roofs are drawn.
      rows: of a plan, those of this GPU.
      classes: of the policies, by name.
      name: the figure's id.
    """
    drawn = [(row, point) for row in rows if (point := step_point(row)) is not None]
    if not drawn:
        return ""
    kernels = [(row, point) for row, _ in drawn for point in kernel_points(row)]
    roofs = _roofs(gpu, [dtype for row in rows for dtype in row.costs.operations])
    intensities = [point.intensity for _, point in (*drawn, *kernels)]
    ridges = [rate / gpu.bandwidth for rate in roofs]
    low, high = svg.decades([*intensities, *ridges, 3 * max(ridges)])
    rates = [rate for _, point in (*drawn, *kernels) for rate in (point.rate, point.rate_without_cache)]
    bottom, top = svg.decades([*rates, *roofs])
    x, y = svg.logarithmic(low, high, _LEFT, _RIGHT), svg.logarithmic(bottom, top, _BOTTOM, _TOP)
    parts = [
        *_grid(range(low, high + 1), range(bottom, top + 1), x, y),
        _slope(gpu, max(roofs), 10.0**low, 10.0**bottom, x, y),
        *(_roof(gpu, rate, names, x, y) for rate, names in roofs.items()),
        *(_kernel(point, classes[row.policy], x, y) for row, point in kernels),
        *(_step(point, classes[row.policy], x, y) for row, point in drawn),
    ]
    return svg.figure(name, _HEIGHT, f"Roofline of {gpu.name}", parts)


def step_point(row: PlanRow) -> Point | None:
    """Returns a row's step as a point; None if it has no matrix products, or moves no bytes.

    Args:
      row: of a plan.
    """
    costs = row.costs
    operations, n_bytes = sum(costs.operations.values()), costs.read_bytes + costs.written_bytes
    if not operations or not n_bytes:
        return None
    said = (
        f"{row.policy}, {row.placement}, batch {row.batch_size}: {with_unit(operations, 'flop')}, "
        f"{with_unit(n_bytes, 'B')}, at least {milliseconds(costs.seconds)}"
    )
    return Point(operations / n_bytes, operations / costs.seconds, operations / costs.seconds_without_cache, 1.0, said)


def kernel_points(row: PlanRow, count: int = _KERNELS) -> list[Point]:
    """Returns the costliest kernels with matrix products of a row as points, all of whose bytes count.

    Args:
      row: of a plan.
      count: how many at most.
    """
    total = row.costs.compute_seconds_without_cache
    drawn = [kernels for kernels in costliest_first(row.costs) if kernels.operations and kernels.n_bytes]
    return [_kernels_point(row.policy, kernels, kernels.all_seconds / total) for kernels in drawn[:count]]


def _kernels_point(policy: str, kernels: Kernels, share: float) -> Point:
    rate = kernels.operations / kernels.seconds
    said = f"{policy}: {kernels.operation}, {share:.1%} of the step, {kernels.times} times"
    return Point(kernels.operations / kernels.n_bytes, rate, rate, share, said)


def _roofs(gpu: GPU, dtypes: Sequence[str]) -> dict[float, str]:
    """Returns the names of dtypes by their rate: those that training mostly uses, and those of these programs."""
    used = {_RATE_OF.get(dtype, "float8" if dtype.startswith("f8") else "") for dtype in dtypes}
    names: dict[float, list[str]] = defaultdict(list)
    for name, rate in gpu.rates.items():
        if name in _SHOWN_ALWAYS or name in used:
            names[rate].append(name)
    return {rate: ", ".join(found) for rate, found in sorted(names.items())}


def _grid(intensities: range, rates: range, x: svg.Scale, y: svg.Scale) -> Iterator[str]:
    for exponent in rates:
        yield svg.level(y(10.0**exponent), _LEFT, _RIGHT, with_unit(10.0**exponent, "flop/s"))
    for exponent in intensities:
        yield f'<path class="grid" d="M{x(10.0**exponent):.1f} {_TOP}V{_BOTTOM}"/>'
        yield svg.text(x(10.0**exponent), _BOTTOM + 16, f"{10.0**exponent:g}", "middle")
    yield svg.text((_LEFT + _RIGHT) / 2, _BOTTOM + 36, "operations for each byte that is read or written", "middle")


def _slope(gpu: GPU, highest: float, least: float, lowest: float, x: svg.Scale, y: svg.Scale) -> str:
    """Returns the roof that the memory's bandwidth is, from the picture's edge to the highest other roof."""
    start, end = max(least, lowest / gpu.bandwidth), highest / gpu.bandwidth
    path = f"M{x(start):.1f} {y(start * gpu.bandwidth):.1f}L{x(end):.1f} {y(highest):.1f}"
    said = svg.title(f"bandwidth of the memory: {with_unit(gpu.bandwidth, 'B/s')}")
    return f'<path class="roof" d="{path}">{said}</path>'


def _roof(gpu: GPU, rate: float, names: str, x: svg.Scale, y: svg.Scale) -> str:
    said = f"{names}: {with_unit(rate, 'flop/s')}"
    line = f'<path class="roof" d="M{x(rate / gpu.bandwidth):.1f} {y(rate):.1f}H{_RIGHT}">{svg.title(said)}</path>'
    return f"{line}\n{svg.text(_RIGHT + 6, y(rate) + 4, said)}"


def _kernel(point: Point, name: str, x: svg.Scale, y: svg.Scale) -> str:
    radius = 2 + 4 * math.sqrt(min(point.share, 1))
    place = f'cx="{x(point.intensity):.1f}" cy="{y(point.rate):.1f}" r="{radius:.1f}"'
    return f'<circle class="{name} kernel" {place}>{svg.title(point.said)}</circle>'


def _step(point: Point, name: str, x: svg.Scale, y: svg.Scale) -> str:
    at, top, bottom = x(point.intensity), y(point.rate), y(point.rate_without_cache)
    line = f'<path class="{name}" stroke-width="2" d="M{at:.1f} {top:.1f}V{bottom:.1f}"/>'
    return f'{line}\n<circle class="{name} step" cx="{at:.1f}" cy="{top:.1f}" r="7">{svg.title(point.said)}</circle>'
