"""The roofline of a device: peak rates and bandwidth, whole steps at their bounds, costliest kernels."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from jmp_train.aot import Device
from jmp_train.planning.kernels import Kernels, costliest_first
from jmp_train.planning.rows import PlanRow, milliseconds
from jmp_train.policies.documents import (
    Axis,
    Chart,
    Dot,
    Label,
    Mark,
    Path,
    Style,
    log_axis,
    series_styles,
    with_unit,
)

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


def roofline_chart(device: Device, rows: Sequence[PlanRow], policies: Iterable[str], name: str) -> Chart | None:
    """Returns arithmetic intensity against operations per second; None if no row has matrix products.

    Args:
      device: whose roofs are drawn.
      rows: of a plan, those of this device.
      policies: of the whole plan, in the order of their colors.
      name: the chart's id.
    """
    steps = [(row, point) for row in rows if (point := step_point(row)) is not None]
    if not steps:
        return None
    kernels = [(row, point) for row, _ in steps for point in kernel_points(row)]
    roofs = _roofs(device, [dtype for row in rows for dtype in row.costs.operations])
    points = [point for _, point in (*steps, *kernels)]
    ridges = [rate / device.bandwidth for rate in roofs]
    x = log_axis([*(point.intensity for point in points), *ridges, 3 * max(ridges)], "{:g}".format)
    x = replace(x, title="operations for each byte that is read or written")
    rates = [rate for point in points for rate in (point.rate, point.rate_without_cache)]
    y = log_axis([*rates, *roofs], lambda rate: with_unit(rate, "flop/s"))
    series, styles = series_styles(policies)
    faint = {f"{key} kernel": replace(style, legend="", opacity=0.6) for key, style in styles.items()}
    solid = {f"{key} step": replace(style, legend="") for key, style in styles.items()}
    marks = [
        *_roof_marks(device, roofs, x, y),
        *(_kernel_dot(point, f"{series[row.policy]} kernel") for row, point in kernels),
        *(mark for row, point in steps for mark in _step_marks(point, series[row.policy])),
    ]
    styles = {**styles, **faint, **solid, "roof": Style("soft", width=1.5)}
    return Chart(name, f"Roofline of {device.name}", x, y, styles, marks, size=(1000, 350), margins=(70, 190, 12, 55))


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


def _roofs(device: Device, dtypes: Sequence[str]) -> dict[float, str]:
    """Returns the names of dtypes by their rate: those that training mostly uses, and those of these programs."""
    used = {_RATE_OF.get(dtype, "float8" if dtype.startswith("f8") else "") for dtype in dtypes}
    names: dict[float, list[str]] = defaultdict(list)
    for name, rate in device.rates.items():
        if name in _SHOWN_ALWAYS or name in used:
            names[rate].append(name)
    return {rate: ", ".join(found) for rate, found in sorted(names.items())}


def _roof_marks(device: Device, roofs: dict[float, str], x: Axis, y: Axis) -> Iterator[Mark]:
    """Yields the slope of the memory's bandwidth, from the chart's edge to the highest peak rate, and the rates."""
    highest = max(roofs)
    start, end = max(x.low, y.low / device.bandwidth), highest / device.bandwidth
    said = f"bandwidth of the memory: {with_unit(device.bandwidth, 'B/s')}"
    yield Path("roof", [[(start, start * device.bandwidth), (end, highest)]], said)
    for rate, names in roofs.items():
        said = f"{names}: {with_unit(rate, 'flop/s')}"
        yield Path("roof", [[(rate / device.bandwidth, rate), (x.high, rate)]], said)
        yield Label(said, x.high, rate, shift=(6, 4))


def _kernel_dot(point: Point, style: str) -> Dot:
    return Dot(style, point.intensity, point.rate, 2 + 4 * math.sqrt(min(point.share, 1)), point.said)


def _step_marks(point: Point, series: str) -> Iterator[Mark]:
    yield Path(series, [[(point.intensity, point.rate), (point.intensity, point.rate_without_cache)]])
    yield Dot(f"{series} step", point.intensity, point.rate, 7, point.said)
