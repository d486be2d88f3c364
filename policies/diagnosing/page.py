"""A diagnosis as one HTML page without scripts or network access: problems, a picture, and all operations."""

from collections.abc import Mapping, Sequence
from html import escape
from string import Template

from jmp_train.policies.autocasting import AutocastRules, rules_code
from jmp_train.policies.diagnosing.picture import picture
from jmp_train.policies.diagnosing.places import place_of
from jmp_train.policies.diagnosing.problems import Problem, where_is
from jmp_train.policies.diagnosing.rows import OperationNumerics
from jmp_train.policies.pages import code_block, document

_STYLE = """\
li:target { outline: 2px solid $bad; outline-offset: 0.4rem; }
.problem h3 { color: $bad; }
.backward { fill: $shade; }
.update { fill: $tint; }
.inherited { stroke: $first; }
.local { stroke: $second; }
.nonfinite { stroke: $bad; }
.mark { fill: $paper; stroke: $soft; }
.mark.problem { stroke: $bad; }
.scroll { overflow: auto; max-height: 40rem; }
td:nth-child(-n + 7), th:nth-child(-n + 7) { text-align: left; }"""
_BODY = Template("""\
<p id="summary">$summary</p>
$collapsed
$picture
$problems
$rules
<h2>Operations</h2>
<p class="soft">The largest error of an operation alone comes first; # is the order in which they run.</p>
<div class="scroll">
<table id="operations">
<thead><tr>$titles</tr></thead>
<tbody>
$rows
</tbody>
</table>
</div>
<footer>Errors are |half - float32| / |float32|, each summed over the elements. The local error is that of an operation
alone, on operands without errors; the inherited error has those of all operations before. Shares are of
elements, over $steps.</footer>""")
_TITLES = (
    "#", "operation", "pass", "module", "code", "dtypes", "shape", "runs", "local error", "inherited error",
    "largest", "smallest", "overflow", "become 0", "subnormal", "NaN", "infinite", "lost terms",
)  # fmt: skip


def page(
    title: str,
    summary: str,
    problems: Sequence[Problem],
    rows: Sequence[OperationNumerics],
    *,
    collapsed: Mapping[str, str],
    rules: AutocastRules,
    steps: int,
) -> str:
    """Returns the page.

    Args:
      title: what was diagnosed.
      summary: a line.
      problems: worst first.
      rows: in the order in which they run.
      collapsed: path of an argument's leaf -> what its values lose when they are cast.
      rules: no more than the entries that mend the problems.
      steps: how often the function was run.
    """
    body = _BODY.substitute(
        summary=escape(summary),
        collapsed="".join(f"<p>Argument {escape(path)}: {escape(text)}.</p>" for path, text in collapsed.items()),
        picture=picture(rows, problems),
        problems=_problems(problems),
        rules=_rules(rules),
        titles="".join(f"<th>{escape(title)}</th>" for title in _TITLES),
        rows="\n".join(_row(number, row) for number, row in _largest_first(rows)),
        steps="one run" if steps == 1 else f"{steps} runs",
    )
    return document(title, body, _STYLE)


def _problems(problems: Sequence[Problem]) -> str:
    if not problems:
        return ""
    items = "\n".join(_problem(number, problem) for number, problem in enumerate(problems, 1))
    return f'<h2>Problems</h2>\n<ol id="problems">\n{items}\n</ol>'


def _problem(number: int, problem: Problem) -> str:
    where = f"{where_is(problem)} {problem.path}".strip()
    copied = code_block(rules_code(problem.remedy.rules))
    return (
        f'<li id="problem-{number}" class="{escape(problem.severity)}">'
        f"<h3>{escape(problem.severity)}: {escape(problem.kind)}, {escape(problem.direction)} pass</h3>"
        f'<p class="soft">{escape(where)}</p>{code_block(problem.code)}<p>{escape(problem.evidence)}</p>'
        f"<p>What mends it: {escape(problem.remedy.text)}</p>{copied}<p>{escape(problem.trial.capitalize())}</p></li>"
    )


def _rules(rules: AutocastRules) -> str:
    code = rules_code(rules)
    if not code:
        return ""
    use = 'policy = dataclasses.replace(jt.get_policy("autocast_float16"), rules=rules)'
    copied = code_block(f"{code}\n{use}", "rules")
    return f"<h2>Rules that mend the problems</h2>\n{copied}"


def _largest_first(rows: Sequence[OperationNumerics]) -> list[tuple[int, OperationNumerics]]:
    return sorted(enumerate(rows, 1), key=lambda item: -item[1].local_error)


def _row(number: int, row: OperationNumerics) -> str:
    dtypes = f"{', '.join(dict.fromkeys(row.dtypes_in))} → {row.dtype}"
    shares = (row.overflowed, row.flushed, row.subnormal, row.nan, row.infinite, row.lost_terms)
    texts = (row.primitive, row.direction, row.path, row.subject or place_of(row.file, row.line), dtypes)
    cells = (
        str(number),
        *map(escape, texts),
        ",".join(map(str, row.shape)),
        str(row.runs),
        *(_number(x) for x in (row.local_error, row.inherited_error, row.largest, row.smallest)),
        *(f"{share:.2%}" if share else "" for share in shares),
    )
    return f"<tr><td>{'<td>'.join(cells)}</tr>"  # HTML ends cells by itself, which saves a third of a large page


def _number(x: float) -> str:
    return f"{x:.2g}" if x else ""
