"""A plan as a page."""

from collections.abc import Sequence

from jmp_train.planning.allowances import Allowances
from jmp_train.planning.charts import batch_chart, has_marks_beyond, memory_chart
from jmp_train.planning.details import details
from jmp_train.planning.roofline import roofline_chart
from jmp_train.planning.rows import PlanRow, gigabytes, milliseconds, table_cells
from jmp_train.policies.documents import Cell, Section, Table, Text, page

_TEXT_COLUMNS = {"GPU", "policy", "placement"}
_MEMORY = (
    "Memory is what each GPU allocates for a step: the arguments (parameters, optimizer state, batch), results that "
    "take no argument's place, constants, and one block for all temporaries. XLA's compiler has laid it out for this "
    "GPU; nothing was run. Of the GPU's memory a step can have jax's pool, or what CUDA, its libraries and, with "
    "several devices, collectives leave if that is less, without what is lost in gaps: "
)
_TIMES = (
    "Times are lower bounds: each kernel at the GPU's peak rate or peak bandwidth, the L2 cache as useful as it can "
    "be. A step takes longer. Casts are bytes that kernels read and write only to convert between floating-point "
    "dtypes."
)
_MARKS = "A solid mark is at what a step can have of the GPU's memory, a dashed one at all of it."
_BATCHES = "Examples of a step, over all devices. Where a step does not grow, there is no bar."
_ROOFLINE = (
    "A large point is a step at its bound; the line below it reaches down to where it is if no byte stays in the "
    "L2 cache, which is why the point itself can be above the slanted roof. Small points are the costliest kernels "
    "with matrix products, the larger the more of the step's time, without the cache. Kernels without matrix "
    "products are in the steps' times, but have no point."
)


def plan_page(title: str, rows: Sequence[PlanRow], allowances: Allowances) -> str:
    """Returns the page.

    Args:
      title: what was planned.
      rows: of a plan.
      allowances: what a GPU's memory has to hold beside the step.
    """
    heads, *cells = table_cells(rows)
    texts = [number for number, head in enumerate(heads) if head in _TEXT_COLUMNS]
    table = [[_cell(*cell, number, row) for cell in zip(heads, line, strict=True)]
             for number, (row, line) in enumerate(zip(rows, cells, strict=True), 1)]  # fmt: skip
    return page(
        title,
        [
            Text(summary(rows), "summary"),
            Table(heads, table, "rows", texts),
            _memory(rows) if rows else None,
            _batches(rows),
            _rooflines(rows),
            Section("Row by row", [details(number, row) for number, row in enumerate(rows, 1)]),
        ],
        [f"{_MEMORY}{_allowed(allowances)}.", _TIMES],
    )


def summary(rows: Sequence[PlanRow]) -> str:
    """Returns a line: how many rows fit, which of them has the largest batch, and which the least time an example.

    Args:
      rows: of a plan.
    """
    fitting = [row for row in rows if row.fits]
    said = [f"{len(fitting)} of {len(rows)} fit{'s' * (len(rows) == 1)}"]
    searched = [row for row in rows if row.largest_batch]
    if searched:
        largest = max(searched, key=lambda row: row.largest_batch or 0)
        said.append(f"the largest batch is {largest.largest_batch}, {_where(largest, rows)}")
    if len(fitting) > 1:
        fastest = min(fitting, key=lambda row: row.step_seconds_bound / max(row.batch_size, 1))
        time = f"{milliseconds(fastest.step_seconds_bound)} a step of batch {fastest.batch_size}"
        said.append(f"the least time of those that fit is {time}, {_where(fastest, rows)}")
    return "; ".join(said) + "."


def _where(row: PlanRow, rows: Sequence[PlanRow]) -> str:
    where = f"{row.policy} on {row.gpu.name}"
    return f"{where}, {row.placement}" if any(other.placement.devices > 1 for other in rows) else where


def _cell(head: str, text: str, number: int, row: PlanRow) -> str | Cell:
    if head == "GPU":
        return Cell(text, link=f"#row-{number}")
    return Cell(text, look="misfit") if head == "fits" and not row.fits else text


def _memory(rows: Sequence[PlanRow]) -> Section:
    beyond = " Marks that are further right than the picture are left out." if has_marks_beyond(rows) else ""
    return Section("Memory at the peak", [memory_chart(rows), Text(_MARKS + beyond, look="soft")])


def _batches(rows: Sequence[PlanRow]) -> Section | None:
    chart = batch_chart(rows)
    return Section("Largest batch that fits", [chart, Text(_BATCHES, look="soft")]) if chart else None


def _rooflines(rows: Sequence[PlanRow]) -> Section | None:
    policies = [row.policy for row in rows]
    sections = []
    for number, gpu in enumerate(dict.fromkeys(row.gpu for row in rows), 1):
        chart = roofline_chart(gpu, [row for row in rows if row.gpu == gpu], policies, f"roofline-{number}")
        sections += [Section(gpu.name, [chart])] if chart else []
    return Section("Roofline", [*sections, Text(_ROOFLINE, look="soft")]) if sections else None


def _allowed(allowances: Allowances) -> str:
    shares = ("memory_fraction", "fragmentation")
    items = vars(allowances).items()
    return ", ".join(f"{name} {f'{value:.0%}' if name in shares else gigabytes(value)}" for name, value in items)
