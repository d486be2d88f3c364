"""What tuning has found as one HTML page without scripts or network access."""

import math
from collections.abc import Sequence
from html import escape
from string import Template

from jmp_train.policies.pages import code_block, document
from jmp_train.tuning.evidence import Float32Entry, FrontPoint, Verification
from jmp_train.tuning.picture import front_picture, loss_picture
from jmp_train.tuning.tolerance import Tolerance

_STYLE = """\
.front, .float32, .point { stroke: $first; }
.tuned, .chosen { stroke: $second; }
.point { fill: $first; }
.chosen { fill: $second; }
.tolerance { stroke: $bad; stroke-dasharray: 6 4; }
.failed { color: $bad; }
td:first-child, th:first-child { text-align: left; }"""
_BODY = Template("""\
<p id="summary">$summary</p>
<table id="shares">
<thead><tr><th>in half precision</th><th>by these rules</th><th>by torch's table</th></tr></thead>
<tbody>
$shares
</tbody>
</table>
<h2>What stays in float32</h2>
$entries
<h2>The rules</h2>
$code
$front
<h2>Under autocast itself</h2>
<p id="verdict"$failed>$verdict, on all examples, $held_out of them held out.</p>
$note
$losses
<footer>$tolerance $made Errors are |half - float32| / |float32|, of gradients as norms. Sums, solvers, and what is
computed of float32 numbers only are float32 in any case.</footer>""")


def page(
    title: str,
    summary: str,
    *,
    entries: Sequence[Float32Entry],
    code: str,
    dtype: str,
    half_flops: tuple[float, float],
    half_elements: tuple[float, float],
    front: Sequence[FrontPoint],
    chosen: FrontPoint | None,
    tolerance: Tolerance,
    verification: Verification,
    made: str,
    note: str,
) -> str:
    """Returns the page.

    Args:
      title: what was tuned.
      summary: a line.
      entries: what stays in float32.
      code: the rules as Python.
      dtype: the half type's name.
      half_flops: shares of the flops in half precision, by torch's table and by the rules.
      half_elements: the same of the results' elements.
      front: the Pareto front of what was tried.
      chosen: what was found, as a point beside the front.
      tolerance: of the errors.
      verification: by autocast itself.
      made: sentences of how it was made.
      note: what the reader should know of the examples, or nothing.
    """
    use = f'policy = dataclasses.replace(jt.get_policy("autocast_{dtype}"), rules=rules)'
    shares = {"flops": half_flops, "elements of results": half_elements}
    figure = front_picture(front, chosen, tolerance.gradient)
    body = _BODY.substitute(
        summary=escape(summary),
        shares="\n".join(
            f"<tr><td>{name}</td>{_share(tuned)}{_share(table)}</tr>" for name, (table, tuned) in shares.items()
        ),
        entries=_entries(entries),
        code=code_block(f"{code}\n{use}", "rules"),
        front=f"<h2>What was tried</h2>\n{figure}" if figure else "",
        verdict=escape(verification.verdict),
        failed="" if verification.passed else ' class="failed"',
        held_out=verification.held_out or "none",
        losses=_losses(verification),
        tolerance=escape(_tolerated(tolerance)),
        made=escape(made),
        note=f'<p id="note">{escape(note)}.</p>' if note else "",
    )
    return document(title, body, _STYLE)


def entries_table(entries: Sequence[Float32Entry]) -> str:
    """Returns what stays in float32 as an HTML table; empty if that is nothing.

    Args:
      entries: in the order of the rules.
    """
    if not entries:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("in float32", "module", "where", "code", "why"))
    cells = [(" ".join(e.primitives), e.path, e.place, e.code, e.why) for e in entries]
    body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in cells)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _share(x: float) -> str:
    return f"<td>{x:.1%}</td>"


def _entries(entries: Sequence[Float32Entry]) -> str:
    if not entries:
        return "<p>No operation has to, beside sums and solvers.</p>"
    items = "\n".join(map(_entry, entries))
    return f'<ol id="entries">\n{items}\n</ol>'


def _entry(entry: Float32Entry) -> str:
    count = f"{entry.operations} operation{'s' * (entry.operations != 1)}"
    where = f"{entry.place} {entry.path}".strip()
    return (
        f"<li><h3>{escape(' '.join(entry.primitives))}</h3>"
        f'<p class="soft">{escape(where)}, {count}</p>{code_block(entry.code)}<p>{escape(entry.why)}</p></li>'
    )


def _losses(verification: Verification) -> str:
    figure = loss_picture(verification.float32_losses, verification.tuned_losses)
    if not figure:
        return ""
    last = f"{verification.tuned_losses[-1]:.4g}, in float32 {verification.float32_losses[-1]:.4g}"
    return f"{figure}\n<p>The loss of step {len(verification.tuned_losses)} is {last}.</p>"


def _tolerated(tolerance: Tolerance) -> str:
    if tolerance.loss == math.inf:
        return "What is tolerated a function of one's own said."
    return (
        f"Tolerated were errors of {tolerance.loss:.2g} in the loss, {tolerance.gradient:.2g} in the gradient, "
        f"{tolerance.leaf:.2g} in that of a single parameter, and a cosine of {tolerance.cosine:.2g}."
    )
