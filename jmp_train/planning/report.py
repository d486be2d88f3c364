"""A plan: the rows as a table, as JSON, as a page."""

from dataclasses import dataclass
from typing import Any

from jmp_train.planning.allowances import Allowances
from jmp_train.planning.page import plan_page
from jmp_train.planning.rows import PlanRow, gigabytes, milliseconds, table_cells
from jmp_train.policies.documents import Section, Table, Text, text

_UNLIMITED = 10_000  # characters of a line


@dataclass(frozen=True)
class Plan:
    """What `plan` returns; printed, it is a table.

    Attributes:
      rows: by GPU, precision and placement, in this order.
      allowances: what a GPU's memory has to hold beside the step.

    Example:
      >>> import jmp_train as jt
      >>> plan = jt.plan(step, state, batch, gpus=["V100-16GB", "A100-40GB"])  # doctest: +SKIP
      >>> print(plan, plan.largest_buffers(5))  # doctest: +SKIP
      >>> Plan(rows=(), allowances=Allowances(memory_fraction=0.9)).to_json()["allowances"]["memory_fraction"]
      0.9
    """

    rows: tuple[PlanRow, ...]
    allowances: Allowances

    def to_json(self) -> dict[str, Any]:
        """Returns all of it as what JSON has."""
        return {"allowances": vars(self.allowances), "rows": [row.to_json() for row in self.rows]}

    def to_html(self, title: str = "Plan") -> str:
        """Returns all of it as one HTML page, without scripts or network access.

        Args:
          title: what was planned.
        """
        return plan_page(title, self.rows, self.allowances)

    def largest_buffers(self, count: int = 10) -> str:
        """Returns a table of the largest buffers at the peak for each row: what they are and what line makes them.

        Args:
          count: how many.
        """
        return text([block for row in self.rows for block in _buffers(row, count)], _UNLIMITED)

    def __str__(self) -> str:
        heads, *cells = table_cells(self.rows)
        said = (
            f"memory: what a GPU allocates for a step, of what it can have where jax's pool is "
            f"{self.allowances.memory_fraction:.0%} (XLA_PYTHON_CLIENT_MEM_FRACTION); least time: a roofline"
        )
        return text([Table(heads, cells), *map(_help, self.rows), Text(said)], _UNLIMITED)


def _help(row: PlanRow) -> Section:
    lines = [
        f"{gigabytes(r.peak_bytes):>9}  {'fits' if r.fits else 'does not fit'}, at least "
        f"{milliseconds(r.step_seconds_bound)}  {r.name}: {r.code}"
        for r in row.remedies
    ]
    return Section(f"{_title(row)}, {gigabytes(row.peak_bytes)}; what could help:", [Text(line) for line in lines])


def _buffers(row: PlanRow, count: int) -> tuple[Text, Table]:
    cells = [
        (
            gigabytes(b.n_bytes), b.kind, b.operation, b.dtype, "x".join(map(str, b.shape)),
            f"{b.module} {b.source}".strip(),
        )
        for b in row.buffers[:count]
    ]  # fmt: skip
    heads = ("bytes", "kind", "operation", "dtype", "shape", "from")
    return Text(f"{_title(row)}, of {gigabytes(row.peak_bytes)}:"), Table(heads, cells)


def _title(row: PlanRow) -> str:
    return f"{row.gpu.name}, {row.policy}, {row.placement}, batch {row.batch_size}"
