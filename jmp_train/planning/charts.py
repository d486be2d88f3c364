"""The bars of a plan: memory at the peak by kind, and the largest batch by device and policy."""

from collections.abc import Sequence
from itertools import groupby

from jmp_train.planning.rows import PlanRow, gigabytes
from jmp_train.policies.documents import (
    Axis,
    Chart,
    Row,
    Style,
    bar_chart,
    round_ticks,
    series_styles,
)

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


def memory_chart(rows: Sequence[PlanRow]) -> Chart:
    """Returns one bar per row: the memory at the peak, with marks at the usable memory and at all memory of the device.

    Args:
      rows: of a plan, at least one.
    """
    most = max(max(row.peak_bytes for row in rows), 1)
    end = min(_MOST_OF_PEAK * most, max(most, *(row.kind.memory_bytes for row in rows)))
    kinds = sorted({kind for row in rows for kind in row.bytes_by_kind}, key=_in_order)
    styles = {
        **{_kind_style(kind): Style(_KINDS.get(kind, _OTHER_KIND), legend=kind) for kind in kinds},
        "usable": Style("ink"),
        "all": Style("soft", dash="3 2"),
        "misfit": Style("bad"),
    }
    axis = Axis(0, end, [(1e9 * value, f"{value:g} GB") for value in round_ticks(end / 1e9)])
    groups = {
        device: [_memory_row(row, _label(row, rows)) for row in group] for device, group in _by_device(rows).items()
    }
    return bar_chart("memory", "Memory at the peak by kind", groups, axis, styles, texts_at_edge=True)


def has_marks_beyond(rows: Sequence[PlanRow]) -> bool:
    """Returns whether the chart of the memory leaves a mark out."""
    most = max(row.peak_bytes for row in rows)
    return any(row.kind.memory_bytes > _MOST_OF_PEAK * most for row in rows)


def batch_chart(rows: Sequence[PlanRow]) -> Chart | None:
    """Returns the largest batches that fit, bars grouped by device; None if no row has one.

    Args:
      rows: of a plan; those without a largest batch have no bar.
    """
    known = [row for row in rows if row.largest_batch is not None]
    if not known:
        return None
    most = max(max(row.largest_batch or 0 for row in known), 1)
    series, styles = series_styles(row.policy for row in rows)
    styles["misfit"] = Style("bad")
    axis = Axis(0, most, [(value, f"{value:g}") for value in round_ticks(most) if value == int(value)])
    groups = {
        device: [_batch_row(row, _label(row, rows), series[row.policy]) for row in group]
        for device, group in _by_device(known).items()
    }
    return bar_chart("batches", "Largest batch that fits", groups, axis, styles)


def _by_device(rows: Sequence[PlanRow]) -> dict[str, list[PlanRow]]:
    return {device: list(group) for device, group in groupby(rows, key=lambda row: row.device)}


def _label(row: PlanRow, rows: Sequence[PlanRow]) -> str:
    """Returns a row's policy, and its placement if not all rows are of one device."""
    placed = any(other.placement.devices > 1 for other in rows)
    return f"{row.policy}, {row.placement}" if placed else row.policy


def _in_order(kind: str) -> tuple[int, str]:
    return list(_KINDS).index(kind) if kind in _KINDS else len(_KINDS), kind


def _kind_style(kind: str) -> str:
    return f"kind{_in_order(kind)[0]}"


def _memory_row(row: PlanRow, label: str) -> Row:
    pieces = [
        (
            _kind_style(kind),
            n_bytes,
            f"{label}: {kind}, {gigabytes(n_bytes)}, {n_bytes / max(row.peak_bytes, 1):.1%}",
        )
        for kind, n_bytes in sorted(row.bytes_by_kind.items(), key=lambda item: _in_order(item[0]))
    ]
    marks = [
        ("usable", row.usable_bytes, f"usable: {gigabytes(row.usable_bytes)}"),
        ("all", row.kind.memory_bytes, f"all memory: {gigabytes(row.kind.memory_bytes)}"),
    ]
    sizes = f"{gigabytes(row.peak_bytes)} of {gigabytes(row.usable_bytes)}"
    return Row(label, pieces, sizes, "" if row.fits else "misfit", marks)


def _batch_row(row: PlanRow, label: str, style: str) -> Row:
    size = row.largest_batch
    if not size:
        return Row(label, [], "none fits", "misfit")
    return Row(label, [(style, size, f"{row.device}, {label}: {size}")], str(size))
