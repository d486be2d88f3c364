"""A comparison as one HTML page without scripts or network access: words, pictures, the worst tokens, operations."""

import math
from collections.abc import Sequence
from html import escape
from string import Template

from jmp_train.policies.comparing.differences import Differences, TokenDifference
from jmp_train.policies.comparing.parted import OperationParity, Operations
from jmp_train.policies.comparing.picture import STYLE, distribution, operations_picture
from jmp_train.policies.diagnosing import place_of
from jmp_train.policies.pages import code_block, document

_STYLE = f"""\
{STYLE}
.scroll {{ overflow: auto; max-height: 40rem; }}
#operations-of-inference td:nth-child(-n + 5), #operations-of-inference th:nth-child(-n + 5) {{ text-align: left; }}"""
_BODY = Template("""\
$summary
$pictures
<h2>The worst tokens</h2>
<table id="worst"><thead><tr><th>token<th>train<th>infer<th>difference</tr></thead>
<tbody>
$worst
</tbody></table>
$operations""")
_OPERATIONS = Template("""\
<h2>Operations of inference</h2>
<div class="scroll"><table id="operations-of-inference">
<thead><tr><th>#<th>operation<th>module<th>code<th>result<th>runs<th>off from training<th>off from float32<th>\
rows that training has not<th>part of the difference</tr></thead>
<tbody>
$rows
</tbody></table></div>
<footer>In the order in which they run. Differences are means over the rows of a result, relative to a row's norm.
Rows that training has not are no fault by themselves: what it computes in other shapes, or masks later, has some.
The part of the difference is what goes away once an operation, after those before it, has training's values. Operations
of the same code are tried together, until hardly any difference is left.
</footer>""")


def page(title: str, summary: str, differences: Differences, operations: Operations | None) -> str:
    """Returns the page.

    Args:
      title: what was compared.
      summary: in words.
      differences: of the tokens.
      operations: of both functions, if they are known.
    """
    pictures = [distribution(differences)] + ([operations_picture(operations)] if operations else [])
    body = _BODY.substitute(
        summary=code_block(summary, "summary"),
        pictures="\n".join(pictures),
        worst="\n".join(map(_token, differences.worst)),
        operations=_table(operations.infer) if operations else "",
    )
    return document(title, body, _STYLE)


def _token(token: TokenDifference) -> str:
    place = f"{token.path}[{', '.join(map(str, token.index))}]"
    cells = (escape(place), *(f"{x:.6g}" for x in (token.train, token.infer)), f"{token.train - token.infer:.2g}")
    return f"<tr><td>{'<td>'.join(cells)}</tr>"


def _table(rows: Sequence[OperationParity]) -> str:
    return _OPERATIONS.substitute(rows="\n".join(_row(number, row) for number, row in enumerate(rows, 1)))


def _row(number: int, row: OperationParity) -> str:
    cells = (
        str(number),
        *map(escape, (row.primitive, row.path, place_of(row.file, row.line))),
        f"{row.dtype}[{','.join(map(str, row.shape))}]",
        str(row.runs),
        *(f"{x:.2g}" if x else "" for x in (row.difference, row.error)),
        f"{row.unknown:.0%}" if row.unknown else "",
        "" if math.isnan(row.contribution) else f"{row.contribution:.0%}",
    )
    return f"<tr><td>{'<td>'.join(cells)}</tr>"
