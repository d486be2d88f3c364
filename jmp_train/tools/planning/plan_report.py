"""A plan: the rows as a table, as JSON, as a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jmp_train.tools.documents import Cell, Section, Table, Text, counted, page, text, with_unit
from jmp_train.tools.planning.plan_rows import PlanRow, gigabytes, milliseconds, table_cells
from jmp_train.tools.planning.search import Cut

_UNLIMITED = 10_000  # characters of a line
_BUFFERS = 20  # of a row, on the page
_CUTS = ("device", "policy", "placement", "not compiled because")
_SAID = (
    "memory: what each device allocates for a step, of what it can have: jax's pool (XLA_PYTHON_CLIENT_MEM_FRACTION), "
    "or what libtpu leaves to programs; least time: a roofline, by the peak rates of arithmetic, memory and links"
)
_HINT = (
    "PlanSearch(placement=True) tries to make steps fit by shards of their state, micro-batches and rematerialization"
)


@dataclass(frozen=True)
class Plan:
    """The result of `plan`; prints as a table.

    Attributes:
      rows: the rows, ordered by machine, precision and placement; of a search, the fastest that fit first.
      cuts: placements that a search did not compile, with reasons.

    Example:
      >>> import jmp_train as jt
      >>> plan = jt.plan(Workload(step, state, batch), ["V100-16GB", "A100-40GB"])  # doctest: +SKIP
      >>> print(plan, plan.largest_buffers(5))  # doctest: +SKIP
      >>> Plan(rows=()).to_json()
      {'rows': [], 'cuts': []}
    """

    rows: tuple[PlanRow, ...]
    cuts: tuple[Cut, ...] = ()

    @property
    def fastest(self) -> PlanRow | None:
        """The row that fits with the least time per example, by its bound; None if none fits."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: row.step_seconds_bound / max(row.batch_size, 1), default=None)

    @property
    def smallest(self) -> PlanRow | None:
        """The row that fits on the fewest devices, of these the fastest; None if none fits."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=lambda row: (row.placement.devices, row.step_seconds_bound), default=None)

    def to_json(self) -> dict[str, Any]:
        """Returns the plan as JSON values."""
        return {"rows": [row.to_json() for row in self.rows], "cuts": [vars(cut) for cut in self.cuts]}

    def to_html(self, title: str = "Plan") -> str:
        """Returns all of it as one HTML page, without scripts or network access.

        Args:
          title: title of the page.
        """
        heads, *cells = table_cells(self.rows)
        table = [
            (Cell(device, "" if row.fits else "misfit", f"#row-{number}"), *rest)
            for number, (row, (device, *rest)) in enumerate(zip(self.rows, cells, strict=True), 1)
        ]
        cuts = [(cut.device, cut.policy, cut.placement, cut.reason) for cut in self.cuts]
        return page(
            title,
            [
                *self._found(),
                Table(heads, table, "rows", range(heads.index("batch") if heads else 0)),
                Section("Memory at the peak by kind", [_by_kind(self.rows)]),
                Section("What was not compiled", [Table(_CUTS, cuts, texts=range(4))], is_folded=True),
                Section("Row by row", [_details(number, row) for number, row in enumerate(self.rows, 1)]),
            ],
            [_SAID],
        )

    def largest_buffers(self, count: int = 10) -> str:
        """Returns a table of each row's largest buffers at the peak, with their kinds and source lines.

        Args:
          count: number of buffers per row.
        """
        titles = [Text(f"{_title(row)}, of {gigabytes(row.peak_bytes)}:") for row in self.rows]
        tables = [_buffers(row, count) for row in self.rows]
        return text([block for pair in zip(titles, tables, strict=True) for block in pair], _UNLIMITED)

    def _found(self) -> list[Text]:
        """Returns the results of a search; of another plan with steps that do not fit, how to search."""
        if not self.cuts:
            return [] if all(row.fits for row in self.rows) else [Text(_HINT)]
        if self.fastest is None or self.smallest is None:
            return [Text("no placement fits")]
        time = milliseconds(self.fastest.step_seconds_bound)
        return [
            Text(f"fastest that fits, at least {time}: {_title(self.fastest)}"),
            Text(f"fewest devices that fit: {_title(self.smallest)}"),
            Text(f"not compiled: {counted(len(self.cuts), 'placement')}, see Plan.cuts"),
        ]

    def __str__(self) -> str:
        heads, *cells = table_cells(self.rows)
        return text([Table(heads, cells), *self._found(), Text(_SAID)], _UNLIMITED)


def _by_kind(rows: Sequence[PlanRow]) -> Table:
    """Returns the memory at the peak by kind, a column per row of the plan."""
    kinds = dict.fromkeys(kind for row in rows for kind in row.bytes_by_kind)
    cells = [(kind, *(gigabytes(row.bytes_by_kind.get(kind, 0)) for row in rows)) for kind in kinds]
    return Table(("kind", *(f"{row.device}, {row.policy}, {row.placement}" for row in rows)), cells, texts=range(1))


def _details(number: int, row: PlanRow) -> Section:
    """Returns a fold with a row's largest buffers and its communication."""
    fits = "fits" if row.fits else "does not fit"
    title = f"{_title(row)}: {gigabytes(row.peak_bytes)} of {gigabytes(row.usable_bytes)}, {fits}"
    sections = [Section("Largest buffers at the peak", [_buffers(row, _BUFFERS)]), _communication(row)]
    return Section(title, sections, f"row-{number}", "" if row.fits else "misfit", is_folded=True)


def _buffers(row: PlanRow, count: int) -> Table:
    cells = [
        (
            with_unit(b.n_bytes, "B"), f"{b.n_bytes / max(row.peak_bytes, 1):.1%}", b.kind, b.operation, b.dtype,
            "x".join(map(str, b.shape)), f"{b.module} {b.source}".strip(),
        )
        for b in row.buffers[:count]
    ]  # fmt: skip
    return Table(("bytes", "share", "kind", "operation", "dtype", "shape", "from"), cells, texts=range(2, 7))


def _communication(row: PlanRow) -> Section:
    heads = ("collective", "dtype", "along", "count", "of devices", "all bytes", "sent by each", "least time",
             "sent to other hosts", "least time there")  # fmt: skip
    cells = [
        (
            item.kind, item.dtype, item.axis, str(item.count), str(item.group_size), with_unit(item.n_bytes, "B"),
            with_unit(item.sent_bytes, "B"), milliseconds(item.seconds),
            with_unit(item.sent_between_hosts, "B"), milliseconds(item.seconds_between_hosts),
        )
        for item in row.costs.communication
    ]  # fmt: skip
    link = f"Over {row.machine.kind.link}, {with_unit(row.machine.kind.link_bandwidth, 'B/s')} in one direction."
    kept = len(heads) if row.placement.hosts > 1 else len(heads) - 2
    return Section("Communication", [Table(heads[:kept], [x[:kept] for x in cells], texts=range(3), note=link)])


def _title(row: PlanRow) -> str:
    return f"{row.device}, {row.policy}, {row.placement}, batch {row.batch_size}"
