"""The charts of a plan: memory at the peak by kind, the largest batches, and rooflines."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jmp_train.tools import documents as doc
from jmp_train.tools.aot import Device
from jmp_train.tools.planning.details import costliest_first
from jmp_train.tools.planning.rows import PlanRow, gigabytes, milliseconds

_MOST_OF_PEAK = 3  # times the longest bar: marks beyond are left out, lest GPUs of 80 GB press bars of 1 GB together
# In the order of the bars, in light and dark colors: the state, the batch, what the step makes, what is not in use.
_KINDS = {
    "parameters": ("#1a73e8", "#8ab4f8"),
    "optimizer state": ("#174ea6", "#4f7fd6"),
    "model state": ("#00838f", "#78d9ec"),
    "batch": ("#80868b", "#bdc1c6"),
    "other arguments": ("#3c4043", "#9aa0a6"),
    "constants": ("#795548", "#bcaaa4"),
    "copies of parameters": ("#9334e6", "#c58af9"),
    "activations saved for the backward pass": ("#e8710a", "#fcad70"),
    "gradients": ("#188038", "#81c995"),
    "temporaries": ("#f9ab00", "#fdd663"),
    "workspaces": ("#d01884", "#ff8bcb"),
    "results": ("#5bb974", "#b7e1c1"),
    "kept for other moments": ("#dadce0", "#4a4e54"),
    "padding": ("#c58b6b", "#8a6a58"),
}
_OTHER_KIND = ("#202124", "#e8eaed")
_USABLE, _ALL = doc.Style("ink"), doc.Style("soft", dash="3 2")

_MARKS = (
    "A solid mark is at what a step can have of the device's memory, a dashed one at all of it. Marks that are further "
    "right than the chart are left out."
)
_BATCHES = "Examples of a step, over all devices. Where a step does not grow, there is no bar."

_ROOF = doc.Style("soft", width=1.5)
_KERNELS = 25  # of a row
_SHOWN_ALWAYS = ("float32", "tfloat32", "bfloat16", "float16")
_RATE_OF = {"f64": "float64", "c128": "float64", "s8": "int8", "u8": "int8"}  # which others are shown only if used


def memory_chart(rows: Sequence[PlanRow]) -> doc.Chart | None:
    """Returns one bar per row: the memory at the peak, with marks at the usable memory and at all memory of the device.

    Args:
      rows: the rows of a plan; without any there is no chart.
    """
    if not rows:
        return None
    most = max(max(row.peak_bytes for row in rows), 1)
    end = min(_MOST_OF_PEAK * most, max(most, *(row.kind.memory_bytes for row in rows)))
    axis = doc.linear_axis(0, end, lambda n_bytes: f"{n_bytes / 1e9:g} GB")
    groups = _by_device(rows, _memory_bar)
    return doc.bar_chart("Memory at the peak by kind", groups, axis, note=_MARKS, texts_at_edge=True)


def batch_chart(rows: Sequence[PlanRow]) -> doc.Chart | None:
    """Returns the largest batches that fit, bars grouped by device; None if no row has one.

    Args:
      rows: the rows of a plan; those without a largest batch have no bar.
    """
    known = [row for row in rows if row.largest_batch is not None]
    if not known:
        return None
    styles = doc.series_styles(row.policy for row in rows)
    axis = doc.linear_axis(0, max(max(row.largest_batch or 0 for row in known), 1), "{:g}".format, least_step=1)
    groups = _by_device(known, lambda row, label: _batch_bar(row, label, styles[row.policy]))
    return doc.bar_chart("Largest batch that fits", groups, axis, note=_BATCHES)


def _by_device(rows: Sequence[PlanRow], bar: Callable[[PlanRow, str], doc.Row]) -> dict[str, list[doc.Row]]:
    """Returns the bars of the rows by device, with the placement in their labels if not all rows are of one device."""
    has_placement = any(row.placement.devices > 1 for row in rows)
    groups: dict[str, list[doc.Row]] = defaultdict(list)
    for row in rows:
        groups[row.device].append(bar(row, f"{row.policy}, {row.placement}" if has_placement else row.policy))
    return groups


def _memory_bar(row: PlanRow, label: str) -> doc.Row:
    sizes, pieces = row.bytes_by_kind, []
    for kind in (*(kind for kind in _KINDS if kind in sizes), *sorted(sizes.keys() - _KINDS.keys())):
        n_bytes = sizes[kind]
        said = f"{label}: {kind}, {gigabytes(n_bytes)}, {n_bytes / max(row.peak_bytes, 1):.1%}"
        pieces.append(doc.Piece(doc.Style(_KINDS.get(kind, _OTHER_KIND), kind), n_bytes, said))
    marks = [
        doc.Piece(_USABLE, row.usable_bytes, f"usable: {gigabytes(row.usable_bytes)}"),
        doc.Piece(_ALL, row.kind.memory_bytes, f"all memory: {gigabytes(row.kind.memory_bytes)}"),
    ]
    used = f"{gigabytes(row.peak_bytes)} of {gigabytes(row.usable_bytes)}"
    return doc.Row(label, pieces, used, "soft" if row.fits else "bad", marks)


def _batch_bar(row: PlanRow, label: str, style: doc.Style) -> doc.Row:
    size = row.largest_batch
    if not size:
        return doc.Row(label, [], "none fits", "bad")
    return doc.Row(label, [doc.Piece(style, size, f"{row.device}, {label}: {size}")], str(size))


@dataclass(frozen=True)
class Point:
    """A step or a kernel in a roofline.

    Attributes:
      intensity: operations per byte that is read or written.
      rate: operations per second at the bound.
      rate_without_cache: the same without the L2 cache.
      share: fraction of the step's bound, 1 for the step itself.
      said: its description.
    """

    intensity: float
    rate: float
    rate_without_cache: float
    share: float
    said: str


def roofline_chart(device: Device, rows: Sequence[PlanRow], styles: Mapping[str, doc.Style]) -> doc.Chart | None:
    """Returns arithmetic intensity against operations per second; None if no row has matrix products.

    Args:
      device: the device with the roofs.
      rows: the plan's rows of this device.
      styles: styles of the policies of the whole plan.
    """
    steps = [(row, point) for row in rows if (point := step_point(row)) is not None]
    if not steps:
        return None
    kernels = [(row, point) for row, _ in steps for point in kernel_points(row)]
    roofs = _roofs(device, [dtype for row in rows for dtype in row.costs.operations])
    points = [point for _, point in (*steps, *kernels)]
    ridges = [rate / device.bandwidth for rate in roofs]
    intensities = [*(point.intensity for point in points), *ridges, 3 * max(ridges)]
    x = doc.log_axis(intensities, "{:g}".format, title="operations for each byte that is read or written")
    rates = [rate for point in points for rate in (point.rate, point.rate_without_cache)]
    y = doc.log_axis([*rates, *roofs], lambda rate: doc.with_unit(rate, "flop/s"))
    marks = [
        *_roof_marks(device, roofs, x, y),
        *(_kernel_dot(point, styles[row.policy]) for row, point in kernels),
        *(mark for row, point in steps for mark in _step_marks(point, styles[row.policy])),
    ]
    return doc.Chart(f"Roofline of {device.name}", x, y, marks, (1000, 350), (70, 190, 12, 55))


def step_point(row: PlanRow) -> Point | None:
    """Returns a row's step as a point; None if it has no matrix products, or moves no bytes.

    Args:
      row: a row of a plan.
    """
    costs = row.costs
    operations, n_bytes = sum(costs.operations.values()), costs.read_bytes + costs.written_bytes
    if not operations or not n_bytes:
        return None
    said = (
        f"{row.policy}, {row.placement}, batch {row.batch_size}: {doc.with_unit(operations, 'flop')}, "
        f"{doc.with_unit(n_bytes, 'B')}, at least {milliseconds(costs.seconds)}"
    )
    return Point(operations / n_bytes, operations / costs.seconds, operations / costs.seconds_without_cache, 1.0, said)


def kernel_points(row: PlanRow) -> list[Point]:
    """Returns the costliest kernels with matrix products of a row as points.

    Args:
      row: a row of a plan.
    """
    total = row.costs.compute_seconds_without_cache
    points = []
    for kernels in costliest_first(row.costs):
        if kernels.operations and kernels.n_bytes:
            share, rate = kernels.all_seconds / total, kernels.operations / kernels.seconds
            said = f"{row.policy}: {kernels.operation}, {share:.1%} of the step, {kernels.times} times"
            points.append(Point(kernels.operations / kernels.n_bytes, rate, rate, share, said))
    return points[:_KERNELS]


def _roofs(device: Device, dtypes: Sequence[str]) -> dict[float, str]:
    """Returns the names of dtypes by their rate: the usual ones of training, and those of these programs."""
    used = {_RATE_OF.get(dtype, "float8" if dtype.startswith("f8") else "") for dtype in dtypes}
    names: dict[float, list[str]] = defaultdict(list)
    for name, rate in device.rates.items():
        if name in _SHOWN_ALWAYS or name in used:
            names[rate].append(name)
    return {rate: ", ".join(found) for rate, found in sorted(names.items())}


def _roof_marks(device: Device, roofs: dict[float, str], x: doc.Axis, y: doc.Axis) -> Iterator[doc.Mark]:
    """Yields the slope of the memory's bandwidth, from the chart's edge to the highest peak rate, and the rates."""
    highest = max(roofs)
    start, end = max(x.low, y.low / device.bandwidth), highest / device.bandwidth
    said = f"bandwidth of the memory: {doc.with_unit(device.bandwidth, 'B/s')}"
    yield doc.Path(_ROOF, [[(start, start * device.bandwidth), (end, highest)]], said)
    for rate, names in roofs.items():
        said = f"{names}: {doc.with_unit(rate, 'flop/s')}"
        yield doc.Path(_ROOF, [[(rate / device.bandwidth, rate), (x.high, rate)]], said)
        yield doc.Label(said, x.high, rate, shift=(6, 4))


def _kernel_dot(point: Point, style: doc.Style) -> doc.Dot:
    radius = 2 + 4 * math.sqrt(min(point.share, 1))
    return doc.Dot(replace(style, legend="", opacity=0.6), point.intensity, point.rate, radius, point.said)


def _step_marks(point: Point, style: doc.Style) -> Iterator[doc.Mark]:
    yield doc.Path(style, [[(point.intensity, point.rate), (point.intensity, point.rate_without_cache)]])
    yield doc.Dot(style, point.intensity, point.rate, 7, point.said)
