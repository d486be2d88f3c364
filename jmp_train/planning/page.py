"""A plan as one HTML page without scripts or network access."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from html import escape
from string import Template

from jmp_train.planning import colors
from jmp_train.planning.allowances import Allowances
from jmp_train.planning.details import details
from jmp_train.planning.picture import batch_picture, has_marks_beyond, kinds, memory_picture
from jmp_train.planning.roofline import roofline_picture
from jmp_train.planning.rows import PlanRow, gigabytes, milliseconds, table_cells
from jmp_train.policies.pages import document

_STYLE = f"""\
{colors.STYLE}
svg .group {{ fill: $ink; font-weight: 600; }}
svg .misfit, .misfit {{ fill: $bad; color: $bad; }}
.usable {{ stroke: $ink; stroke-width: 2; }}
.all {{ stroke: $soft; stroke-width: 2; stroke-dasharray: 3 2; }}
.roof {{ stroke: $soft; stroke-width: 1.5; fill: none; }}
.kernel {{ fill-opacity: 0.35; stroke-width: 0.7; }}
.step {{ stroke: $paper; }}
.scroll {{ overflow: auto; max-height: 40rem; }}
a {{ color: inherit; }}
details {{ border-bottom: 1px solid $rule; padding: 0.3rem 0; }}
summary {{ cursor: pointer; }}
details div {{ scroll-margin-top: 2.5rem; }}
details h3 {{ margin: 0.8rem 0 0.2rem; }}
td.text, th.text {{ text-align: left; }}"""
_BODY = Template("""\
<p id="summary">$summary</p>
<div class="scroll">
<table id="rows">
$table
</table>
</div>
$memory
$batches
$rooflines
<h2>Row by row</h2>
$details
<footer>
<p>Memory is what each GPU allocates for a step: the arguments (parameters, optimizer state, batch), results that take
no argument's place, constants, and one block for all temporaries. XLA's compiler has laid it out for this GPU; nothing
was run. Of the GPU's memory a step can have jax's pool, or what CUDA, its libraries and, with several devices,
collectives leave if that is less, without what is lost in gaps: $allowances.</p>
<p>Times are lower bounds: each kernel at the GPU's peak rate or peak bandwidth, the L2 cache as useful as it can be.
A step takes longer. Casts are bytes that kernels read and write only to convert between floating-point dtypes.</p>
</footer>""")
_TEXT_COLUMNS = {"GPU", "policy", "placement"}


def page(title: str, rows: Sequence[PlanRow], allowances: Allowances) -> str:
    """Returns the page.

    Args:
      title: what was planned.
      rows: of a plan.
      allowances: what a GPU's memory has to hold beside the step.
    """
    body = _BODY.substitute(
        summary=escape(summary(rows)),
        table=_table(rows),
        memory=_memory(rows),
        batches=_batches(rows),
        rooflines=_rooflines(rows),
        details="\n".join(details(number, row) for number, row in enumerate(rows, 1)),
        allowances=escape(_allowed(allowances)),
    )
    return document(title, body, _STYLE)


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


def _table(rows: Sequence[PlanRow]) -> str:
    heads, *cells = table_cells(rows)
    head = "".join(f"<th{_class_of(head)}>{escape(head)}</th>" for head in heads)
    body = "\n".join(
        f"<tr>{''.join(_cell(head, cell, number, row) for head, cell in zip(heads, texts, strict=True))}</tr>"
        for number, (row, texts) in enumerate(zip(rows, cells, strict=True), 1)
    )
    return f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>"


def _class_of(head: str) -> str:
    return ' class="text"' if head in _TEXT_COLUMNS else ""


def _cell(head: str, cell: str, number: int, row: PlanRow) -> str:
    if head == "GPU":
        return f'<td class="text"><a href="#row-{number}">{escape(cell)}</a></td>'
    if head == "fits" and not row.fits:
        return f'<td class="misfit">{escape(cell)}</td>'
    return f"<td{_class_of(head)}>{escape(cell)}</td>"


def _memory(rows: Sequence[PlanRow]) -> str:
    figure = memory_picture(rows)
    if not figure:
        return ""
    beyond = " Marks that are further right than the picture are left out." if has_marks_beyond(rows) else ""
    return (
        f"<h2>Memory at the peak</h2>\n{colors.legend(kinds(rows))}\n{figure}\n"
        f'<p class="soft">A solid mark is at what a step can have of the GPU\'s memory, a dashed one at all of it.'
        f"{beyond}</p>"
    )


def _batches(rows: Sequence[PlanRow]) -> str:
    figure = batch_picture(rows)
    if not figure:
        return ""
    legend = colors.legend(colors.series_classes(row.policy for row in rows))
    note = '<p class="soft">Examples of a step, over all devices. Where a step does not grow, there is no bar.</p>'
    return f"<h2>Largest batch that fits</h2>\n{legend}\n{figure}\n{note}"


def _rooflines(rows: Sequence[PlanRow]) -> str:
    classes = colors.series_classes(row.policy for row in rows)
    gpus = dict.fromkeys(row.gpu for row in rows)
    figures = []
    for number, gpu in enumerate(gpus, 1):
        figure = roofline_picture(gpu, [row for row in rows if row.gpu == gpu], classes, f"roofline-{number}")
        if figure:
            figures.append(f"<h3>{escape(gpu.name)}</h3>\n{figure}")
    if not figures:
        return ""
    note = (
        "A large point is a step at its bound; the line below it reaches down to where it is if no byte stays in the "
        "L2 cache, which is why the point itself can be above the slanted roof. Small points are the costliest kernels "
        "with matrix products, the larger the more of the step's time, without the cache. Kernels without matrix "
        "products are in the steps' times, but have no point."
    )
    shown = "\n".join(figures)
    return f'<h2>Roofline</h2>\n{colors.legend(classes)}\n{shown}\n<p class="soft">{note}</p>'


def _allowed(allowances: Allowances) -> str:
    said: dict[str, Callable[[float], str]] = {
        "memory_fraction": lambda x: f"{x:.0%}",
        "fragmentation": lambda x: f"{x:.0%}",
    }
    items: Iterable[tuple[str, float]] = ((f.name, getattr(allowances, f.name)) for f in dataclasses.fields(allowances))
    return ", ".join(f"{name} {said.get(name, gigabytes)(value)}" for name, value in items)
