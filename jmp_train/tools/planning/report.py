"""A plan: the rows as a table, as JSON, as a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jmp_train.tools.documents import Cell, Section, Table, Text, counted, page, series_styles, text
from jmp_train.tools.planning.allowances import Allowances
from jmp_train.tools.planning.charts import batch_chart, memory_chart, roofline_chart
from jmp_train.tools.planning.details import buffers_table, details, remedies_table
from jmp_train.tools.planning.rows import PlanRow, device_head, device_kinds, gigabytes, milliseconds, table_cells
from jmp_train.tools.planning.search import Cut

_UNLIMITED = 10_000  # characters of a line
_CUTS = ("device", "policy", "placement", "not compiled because")
_MEMORY = (
    "Memory is what each {} allocates for a step: arguments (parameters, optimizer state, batch), results that take no "
    "argument's place, constants, and one block for all temporaries, laid out by XLA's compiler. Nothing was run. "
)
_USABLE_OF = {
    "GPU": "Of the GPU's memory, a step can have jax's pool, or what CUDA, its libraries and collectives leave if that "
    "is less, without what is lost in gaps: {}.",
    "TPU": "Of the TPU's memory, a step can have what libtpu leaves to programs, without what is lost in gaps: {}.",
}
_TIMES = "Times are lower bounds: {}. Casts are bytes that kernels read and write only to convert between float dtypes."
_TIMES_OF = {
    "GPU": "each kernel at the GPU's peak rate or peak bandwidth, the L2 cache as useful as it can be",
    "TPU": "all products at the TPU's peak rate, or all bytes at the peak bandwidth of its memory",
}
_ROOFLINE = (
    "A large point is a step at its bound, which can be above the slanted roof; the line below it ends at its rate "
    "without the L2 cache. Small points are the costliest kernels with matrix products, without the cache; the larger, "
    "the more of the step's time. Other kernels are only in the steps' times."
)


@dataclass(frozen=True)
class Plan:
    """The result of `plan`; prints as a table.

    Attributes:
      rows: the rows, ordered by device, precision and placement.
      allowances: memory that a step cannot have.
      cuts: placements that a search did not compile, with reasons.

    Example:
      >>> import jmp_train as jt
      >>> plan = jt.plan(step, state, batch, gpus=["V100-16GB", "A100-40GB"])  # doctest: +SKIP
      >>> print(plan, plan.largest_buffers(5))  # doctest: +SKIP
      >>> Plan(rows=(), allowances=Allowances(memory_fraction=0.9)).to_json()["allowances"]["memory_fraction"]
      0.9
    """

    rows: tuple[PlanRow, ...]
    allowances: Allowances
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
        cuts = {"cuts": [vars(cut) for cut in self.cuts]} if self.cuts else {}
        return {"allowances": vars(self.allowances), "rows": [row.to_json() for row in self.rows], **cuts}

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
                Text(self._summary, "summary"),
                Table(heads, table, "rows", range(heads.index("batch"))),
                memory_chart(self.rows),
                batch_chart(self.rows),
                _rooflines(self.rows),
                Section("What was not compiled", [Table(_CUTS, cuts, texts=range(4))], is_folded=True),
                Section("Row by row", [details(number, row) for number, row in enumerate(self.rows, 1)]),
            ],
            _footer(self.rows, self.allowances),
        )

    def largest_buffers(self, count: int = 10) -> str:
        """Returns a table of each row's largest buffers at the peak, with their kinds and source lines.

        Args:
          count: number of buffers per row.
        """
        titles = [Text(f"{_title(row)}, of {gigabytes(row.peak_bytes)}:") for row in self.rows]
        tables = [buffers_table(row, count) for row in self.rows]
        return text([block for pair in zip(titles, tables, strict=True) for block in pair], _UNLIMITED)

    @property
    def _summary(self) -> str:
        """Summary: the number of rows that fit, and those with the largest batch and the least time per example."""
        fitting = sum(row.fits for row in self.rows)
        said = [f"{fitting} of {len(self.rows)} fit{'s' * (len(self.rows) == 1)}"]
        largest = max(self.rows, key=lambda row: row.largest_batch or 0, default=None)
        if largest and largest.largest_batch:
            said.append(f"the largest batch is {largest.largest_batch}, {_where(largest)}")
        if fitting > 1 and self.fastest:
            time = f"{milliseconds(self.fastest.step_seconds_bound)} a step of batch {self.fastest.batch_size}"
            said.append(f"the least time of those that fit is {time}, {_where(self.fastest)}")
        return "; ".join(said) + "."

    def _found(self) -> list[Text]:
        """Returns the results of a search; empty for other plans."""
        fastest, smallest = self.fastest, self.smallest
        if not self.cuts or fastest is None or smallest is None:
            return [Text("no placement fits")] if self.cuts else []
        time = milliseconds(fastest.step_seconds_bound)
        return [
            Text(f"fastest that fits, at least {time}: {_title(fastest)}"),
            Text(f"fewest devices that fit: {_title(smallest)}"),
            Text(f"not compiled: {counted(len(self.cuts), 'placement')}, see Plan.cuts"),
        ]

    def __str__(self) -> str:
        heads, *cells = table_cells(self.rows)
        notes = dict.fromkeys(f"{row.device}, {row.policy}: {note}" for row in self.rows for note in row.notes)
        helps = [
            Section(f"{_title(row)}, {gigabytes(row.peak_bytes)}; what could help:", [remedies_table(row)])
            for row in self.rows
        ]
        blocks = [Table(heads, cells), *helps, *map(Text, notes), *self._found()]
        return text([*blocks, Text(_said(self.rows, self.allowances))], _UNLIMITED)


def _said(rows: Sequence[PlanRow], allowances: Allowances) -> str:
    """Returns the notes about memory and time below the table."""
    head = device_head(rows)
    of = "of what libtpu leaves to programs"
    if head != "TPU":
        fraction = f"{allowances.memory_fraction:.0%} (XLA_PYTHON_CLIENT_MEM_FRACTION)"
        of = f"of what it can have where jax's pool is {fraction}" + (f", or {of}" if head == "device" else "")
    return f"memory: what a {head} allocates for a step, {of}; least time: a roofline"


def _title(row: PlanRow) -> str:
    return f"{row.device}, {row.policy}, {row.placement}, batch {row.batch_size}"


def _where(row: PlanRow) -> str:
    return f"{row.policy} on {row.device}, {row.placement}"


def _rooflines(rows: Sequence[PlanRow]) -> Section | None:
    styles = series_styles(row.policy for row in rows)
    charts = [
        roofline_chart(kind, [row for row in rows if row.kind == kind], styles)
        for kind in dict.fromkeys(row.kind for row in rows)
    ]
    return Section("Roofline", [*charts, Text(_ROOFLINE, look="soft")]) if any(charts) else None


def _footer(rows: Sequence[PlanRow], allowances: Allowances) -> list[str]:
    """Returns the notes about memory and times."""
    shares = ("memory_fraction", "fragmentation")
    allowed = {name: f"{x:.0%}" if name in shares else gigabytes(x) for name, x in vars(allowances).items()}
    of_gpu = ", ".join(f"{name} {value}" for name, value in allowed.items())
    given = {"GPU": of_gpu, "TPU": f"fragmentation {allowed['fragmentation']}"}
    heads = device_kinds(rows)
    usable = " ".join(_USABLE_OF[head].format(given[head]) for head in heads)
    times = _TIMES.format("; ".join(_TIMES_OF[head] for head in heads))
    return [_MEMORY.format(device_head(rows)) + usable, times]
