"""The bars of a plan as SVG: memory at the peak by kind, and the largest batch by GPU and policy."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from jmp_train.planning import colors
from jmp_train.planning.rows import PlanRow, gigabytes
from jmp_train.policies.pages import svg

_LEFT, _RIGHT, _TOP = 230, 860, 6
_PITCH, _BAR, _HEAD = 22, 14, 22  # of a row, of its bar, and of a group's name
_LONGEST_LABEL = 36  # characters beside a bar; the rest is in its title
_MOST_OF_PEAK = 3  # times the longest bar: marks beyond are left out, lest GPUs of 80 GB press bars of 1 GB together


def memory_picture(rows: Sequence[PlanRow]) -> str:
    """Returns a figure: what is in memory at the peak, a bar a row, with marks at what is usable and at all memory.

    Args:
      rows: of a plan.
    """
    if not rows:
        return ""
    most = max(max(row.peak_bytes for row in rows), 1)
    end = min(_MOST_OF_PEAK * most, max(most, *(row.gpu.memory_bytes for row in rows)))
    x = svg.linear(0, end, _LEFT, _RIGHT)
    parts, height = [], float(_TOP)
    for gpu, group in _by_gpu(rows):
        parts.append(svg.text(0, height + 14, gpu, name="group"))
        height += _HEAD
        for row in group:
            parts += _memory_row(row, _label(row, rows), x, height, end)
            height += _PITCH
    axis = [(x(1e9 * value), f"{value:g} GB") for value in svg.ticks(end / 1e9)]
    return svg.figure("memory", height + 24, "Memory at the peak by kind", [*_axis(axis, height), *parts])


def kinds(rows: Sequence[PlanRow]) -> dict[str, str]:
    """Returns the kinds of memory that rows have, in the order of their bars, with their classes.

    Args:
      rows: of a plan.
    """
    found = {kind for row in rows for kind in row.bytes_by_kind}
    return {kind: colors.kind_class(kind) for kind in sorted(found, key=_in_order)}


def has_marks_beyond(rows: Sequence[PlanRow]) -> bool:
    """Returns whether the picture of the memory leaves a mark out.

    Args:
      rows: of a plan.
    """
    most = max(row.peak_bytes for row in rows)
    return any(row.gpu.memory_bytes > _MOST_OF_PEAK * most for row in rows)


def batch_picture(rows: Sequence[PlanRow]) -> str:
    """Returns a figure: the largest batch that fits, bars grouped by GPU; empty if none was searched for.

    Args:
      rows: of a plan; where no largest batch is known there is no bar.
    """
    known = [row for row in rows if row.largest_batch is not None]
    if not known:
        return ""
    most = max(max(row.largest_batch or 0 for row in known), 1)
    x = svg.linear(0, most, _LEFT, _RIGHT)
    classes = colors.series_classes(row.policy for row in rows)
    parts, height = [], float(_TOP)
    for gpu, group in _by_gpu(known):
        parts.append(svg.text(0, height + 14, gpu, name="group"))
        height += _HEAD
        for row in group:
            parts += _batch_row(row, _label(row, rows), classes[row.policy], x, height)
            height += _PITCH
    axis = [(x(value), f"{value:g}") for value in svg.ticks(most) if value == int(value)]
    return svg.figure("batches", height + 24, "Largest batch that fits", [*_axis(axis, height), *parts])


def _by_gpu(rows: Sequence[PlanRow]) -> Iterator[tuple[str, list[PlanRow]]]:
    for gpu, group in groupby(rows, key=lambda row: row.gpu.name):
        yield gpu, list(group)


def _label(row: PlanRow, rows: Sequence[PlanRow]) -> str:
    """Returns a row's policy, and its placement where not all are one device."""
    placed = any(other.placement.devices > 1 for other in rows)
    return f"{row.policy}, {row.placement}" if placed else row.policy


def _in_order(kind: str) -> tuple[int, str]:
    return colors.kind_order(kind), kind


def _axis(places: Sequence[tuple[float, str]], bottom: float) -> Iterator[str]:
    for x, label in places:
        yield f'<path class="grid" d="M{x:.1f} {_TOP}V{bottom:.1f}"/>'
        yield svg.text(x, bottom + 16, label, "middle")


def _row_name(label: str, top: float) -> str:
    short = label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"
    return svg.text(_LEFT - 8, top + 11, short, "end")


def _memory_row(row: PlanRow, label: str, x: svg.Scale, top: float, end: float) -> Iterator[str]:
    yield _row_name(label, top)
    start = 0
    for kind, n_bytes in sorted(row.bytes_by_kind.items(), key=lambda item: _in_order(item[0])):
        left, width = x(start), x(start + n_bytes) - x(start)
        said = svg.title(f"{label}: {kind}, {gigabytes(n_bytes)}, {n_bytes / max(row.peak_bytes, 1):.1%}")
        yield (
            f'<rect class="{colors.kind_class(kind)}" x="{left:.2f}" y="{top:.1f}" width="{width:.2f}" height="{_BAR}">'
            f"{said}</rect>"
        )
        start += n_bytes
    for name, n_bytes, said in (("usable", row.usable_bytes, "usable"), ("all", row.gpu.memory_bytes, "all memory")):
        if n_bytes <= end:
            place = f"M{x(n_bytes):.2f} {top - 3:.1f}v{_BAR + 6}"
            yield f'<path class="{name}" d="{place}">{svg.title(f"{said}: {gigabytes(n_bytes)}")}</path>'
    sizes = f"{gigabytes(row.peak_bytes)} of {gigabytes(row.usable_bytes)}"
    yield svg.text(svg.WIDTH, top + 11, sizes, "end", "" if row.fits else "misfit")


def _batch_row(row: PlanRow, label: str, name: str, x: svg.Scale, top: float) -> Iterator[str]:
    yield _row_name(label, top)
    size = row.largest_batch or 0
    if not size:
        yield svg.text(_LEFT + 4, top + 11, "none fits", name="misfit")
        return
    said = svg.title(f"{row.gpu.name}, {label}: {size}")
    yield (
        f'<rect class="{name}" x="{_LEFT}" y="{top:.1f}" width="{x(size) - _LEFT:.2f}" height="{_BAR}">{said}</rect>'
    )
    yield svg.text(x(size) + 6, top + 11, str(size))
