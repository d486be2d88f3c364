"""The details of a single row of a plan, its costliest kernels among them: its fold on the page, and printed tables."""

import dataclasses
import re
from collections.abc import Iterable, Sequence

from jmp_train.tools.aot import Costs
from jmp_train.tools.documents import Section, Table, Text, counted, with_unit
from jmp_train.tools.planning.rows import PlanRow, gigabytes, milliseconds

_BUFFERS, _KERNELS = 20, 10


def details(number: int, row: PlanRow) -> Section:
    """Returns a fold with a row's largest buffers, remedies, communication, batches and costliest kernels.

    Args:
      number: number of the row, from 1.
      row: a row of a plan.
    """
    fits = "fits" if row.fits else "does not fit"
    said = f"{gigabytes(row.peak_bytes)} of {gigabytes(row.usable_bytes)} with batch {row.batch_size}, {fits}"
    sections = [
        *map(Text, row.notes),
        Section("What could help", [remedies_table(row, "With the same batch.")]),
        Section("Largest buffers at the peak", [buffers_table(row, _BUFFERS, _buffers_note(row))]),
        _batches(row),
        _communication(row),
        _kernels(row),
    ]
    title = f"{row.device}, {row.policy}, {row.placement}: {said}"
    return Section(title, sections, f"row-{number}", "" if row.fits else "misfit", is_folded=True)


def _section(title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], texts: int, note: str = "") -> Section:
    """Returns a titled table, whose last columns, `texts` of them, are text."""
    return Section(title, [Table(heads, list(rows), texts=range(len(heads) - texts, len(heads)), note=note)])


def buffers_table(row: PlanRow, count: int, note: str = "") -> Table:
    """Returns the largest buffers at the peak, with their kinds and source lines."""
    cells = [
        (
            _size(b.n_bytes), f"{b.n_bytes / max(row.peak_bytes, 1):.1%}", b.kind, b.operation, b.dtype,
            "x".join(map(str, b.shape)), f"{b.module} {b.source}".strip(),
        )
        for b in row.buffers[:count]
    ]  # fmt: skip
    return Table(("bytes", "share", "kind", "operation", "dtype", "shape", "from"), cells, texts=range(2, 7), note=note)


def _buffers_note(row: PlanRow) -> str:
    tiles = f"Filling of tiles takes {_size(row.tile_bytes)} of the memory at the peak." if row.tile_bytes else ""
    rest = row.buffers[_BUFFERS:]
    size = _size(sum(buffer.n_bytes for buffer in rest))
    further = f"{len(rest)} more {'has' if len(rest) == 1 else 'have'} {size}." if rest else ""
    return f"{tiles} {further}".strip()


def remedies_table(row: PlanRow, note: str = "") -> Table:
    """Returns the remedies with their memory and least time."""
    cells = [
        (gigabytes(r.peak_bytes), "yes" if r.fits else "no", milliseconds(r.step_seconds_bound), r.name, r.code)
        for r in row.remedies
    ]
    return Table(("memory", "fits", "least time", "change", "code"), cells, texts=range(3, 5), note=note)


def _batches(row: PlanRow) -> Section | None:
    if row.largest is None:
        return None
    found = row.largest.size
    cells = (
        (str(size), gigabytes(n_bytes), "yes" if n_bytes <= row.usable_bytes else "no", "largest" * (size == found))
        for size, n_bytes in sorted(row.largest.tried.items())
    )
    note = "" if row.largest.is_monotonic else "Larger batches did not always need more memory."
    return _section("Batches that were compiled", ("batch", "memory", "fits", ""), cells, 1, note)


def _communication(row: PlanRow) -> Section:
    heads = ("count", "of devices", "all bytes", "sent by each", "least time", "collective", "dtype", "along")
    over_hosts = row.placement.hosts > 1
    if over_hosts:
        heads = (*heads[:5], "sent to other hosts", "least time there", *heads[5:])
    cells = (
        (
            str(item.count), str(item.group_size), _size(item.n_bytes), _size(item.sent_bytes), _time(item.seconds),
            *((_size(item.sent_between_hosts), _time(item.seconds_between_hosts)) if over_hosts else ()),
            item.kind, item.dtype, item.axis,
        )
        for item in row.costs.communication
    )  # fmt: skip
    link = f"Over {row.kind.link}, {with_unit(row.kind.link_bandwidth, 'B/s')} in one direction."
    return _section("Communication", heads, cells, 3, link)


def _kernels(row: PlanRow) -> Section:
    total = row.costs.compute_seconds_without_cache
    cells = (
        (
            _time(found.all_seconds),
            f"{found.all_seconds / total:.1%}" if total else "",
            str(found.times),
            with_unit(found.operations, "flop") if found.operations else "",
            _size(found.n_bytes),
            ", ".join(found.dtypes),
            found.operation,
        )
        for found in costliest_first(row.costs)[:_KERNELS]
    )
    heads = ("least time", "share", "times", "operations", "bytes", "products of", "operation")
    return _section("Costliest kernels", heads, cells, 2, _kernel_note(row))


def _kernel_note(row: PlanRow) -> str:
    """Returns a note about costs that the times leave out."""
    costs = row.costs
    said = ["Operations and bytes are of one execution, times and shares of all, without the L2 cache."]
    said += [
        f"Operations of {name} are not known: {counted(count, 'kernel')}." for name, count in costs.uncounted.items()
    ]
    if costs.unknown_loops:
        said.append(f"Counted once: {counted(costs.unknown_loops, 'loop')} of unknown length.")
    if costs.conditionals:
        said.append(f"Of {counted(costs.conditionals, 'conditional')} the fastest branch counts.")
    return " ".join(said)


def _time(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.3g} µs"


def _size(n_bytes: float) -> str:
    return with_unit(n_bytes, "B")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """Equal kernels of one operation.

    Attributes:
      operation: jax's name of their operation, or the compiler's name.
      dtypes: XLA's dtypes of the operands of their matrix products.
      operations: operations of the matrix products in one execution.
      n_bytes: bytes that one execution reads and writes.
      times: number of executions in a step, of all together.
      seconds: the least time of one execution without the L2 cache.
    """

    operation: str
    dtypes: tuple[str, ...]
    operations: int
    n_bytes: int
    times: int
    seconds: float

    @property
    def all_seconds(self) -> float:
        """The least time of all executions."""
        return self.times * self.seconds


def costliest_first(costs: Costs) -> list[Kernels]:
    """Returns the kernels of a step by the least time that they take together, without the L2 cache.

    Args:
      costs: costs of the step.
    """
    alike: dict[tuple[object, ...], list[Kernels]] = {}
    for kernel in costs.kernels:
        found = Kernels(
            operation=_inside_of_wrappers(kernel.op_name) or kernel.name,
            dtypes=tuple(dict.fromkeys(product.dtype for product in kernel.products)),
            operations=sum(product.operations for product in kernel.products),
            n_bytes=kernel.read_bytes + kernel.written_bytes,
            times=kernel.times,
            seconds=kernel.seconds_without_cache,
        )
        key = tuple(value for name, value in vars(found).items() if name != "times")
        alike.setdefault(key, []).append(found)
    return sorted(map(_joined, alike.values()), key=lambda found: -found.all_seconds)


def _joined(equal: list[Kernels]) -> Kernels:
    return dataclasses.replace(equal[0], times=sum(kernels.times for kernels in equal))


def _inside_of_wrappers(op_name: str) -> str:
    """Returns an operation's name without the functions around the whole step, which a plan has added itself."""
    return re.sub(r"^(jit\(\w+\)/|call_exported/)+", "", op_name)
