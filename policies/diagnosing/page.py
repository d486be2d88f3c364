"""A diagnosis as a page with problems, a chart and all operations; as a table for notebooks; as text."""

from collections.abc import Mapping, Sequence

from jmp_train.policies.autocasting import AutocastRules, rules_code
from jmp_train.policies.diagnosing.chart import errors_chart
from jmp_train.policies.diagnosing.places import place_of
from jmp_train.policies.diagnosing.problems import Problem, where_is
from jmp_train.policies.diagnosing.rows import OperationNumerics
from jmp_train.policies.documents import Block, Code, Section, Table, Text, page

_LARGEST = "The largest error of an operation alone comes first; # is the order in which they run."
_ERRORS = (
    "Errors are |half - float32| / |float32|, each summed over the elements. The local error is that of an operation "
    "alone, on operands without errors; the inherited error has those of all operations before. Shares are of "
    "elements, over "
)
_HEADS = (
    "#", "operation", "pass", "module", "code", "dtypes", "shape", "runs", "local error", "inherited error",
    "largest", "smallest", "overflow", "become 0", "subnormal", "NaN", "infinite", "lost terms",
)  # fmt: skip
_HOW_TO_APPLY = (
    "rules.replace(...) is of AutocastRules, and report.rules has all of these, for "
    "AutocastPolicy(..., rules=report.rules)"
)


def diagnosis_page(
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
    code = rules_code(rules)
    use = 'policy = dataclasses.replace(jt.get_policy("autocast_float16"), rules=rules)'
    ordered = sorted(enumerate(rows, 1), key=lambda item: -item[1].local_error)
    operations = Table(_HEADS, [_row(number, row) for number, row in ordered], "operations", texts=range(7))
    return page(
        title,
        [
            Text(summary, "summary"),
            *(Text(f"Argument {path}: {text}.") for path, text in collapsed.items()),
            errors_chart(rows, problems),
            Section("Problems", [_problem(*item) for item in enumerate(problems, 1)], "problems"),
            Section("Rules that mend the problems", [Code(f"{code}\n{use}" if code else "", "rules")]),
            Section("Operations", [Text(_LARGEST, look="soft"), operations]),
        ],
        [f"{_ERRORS}{'one run' if steps == 1 else f'{steps} runs'}."],
    )


def problem_table(problems: Sequence[Problem]) -> Table:
    """Returns what a notebook shows of the problems."""
    heads = ("", "what", "pass", "where", "code", "evidence", "what mends it")
    rows = [
        (p.severity, p.kind, p.direction, _where(p), p.code, p.evidence, f"{p.remedy} {p.trial}".strip())
        for p in problems
    ]
    return Table(heads, rows, texts=range(7))


def text_blocks(problems: Sequence[Problem]) -> list[Block]:
    """Returns what is printed of the problems."""
    blocks: list[Block] = []
    for problem in problems:
        where = where_is(problem) + (f" ({problem.path})" if problem.path else "")
        head = f"{problem.severity}: {problem.kind}, {problem.direction} pass, {where}"
        said = (problem.evidence, f"-> {problem.remedy}", problem.trial)
        blocks.append(Section(head, [Code(problem.code), *map(Text, said)]))
    if any(problem.remedy.action == "rules" and problem.severity == "problem" for problem in problems):
        blocks.append(Text(_HOW_TO_APPLY))
    return blocks


def _where(problem: Problem) -> str:
    return f"{where_is(problem)} {problem.path}".strip()


def _problem(number: int, problem: Problem) -> Section:
    blocks = [
        Text(_where(problem), look="soft"),
        Code(problem.code),
        Text(problem.evidence),
        Text(f"What mends it: {problem.remedy.text}"),
        Code(rules_code(problem.remedy.rules)),
        Text(problem.trial.capitalize()),
    ]
    title = f"{number}. {problem.severity}: {problem.kind}, {problem.direction} pass"
    return Section(title, blocks, f"problem-{number}", problem.severity)


def _row(number: int, row: OperationNumerics) -> tuple[str, ...]:
    dtypes = f"{', '.join(dict.fromkeys(row.dtypes_in))} → {row.dtype}"
    shares = (row.overflowed, row.flushed, row.subnormal, row.nan, row.infinite, row.lost_terms)
    errors = (row.local_error, row.inherited_error, row.largest, row.smallest)
    return (
        str(number),
        *(row.primitive, row.direction, row.path, row.subject or place_of(row.file, row.line), dtypes),
        *(",".join(map(str, row.shape)), str(row.runs)),
        *(f"{x:.2g}" if x else "" for x in errors),
        *(f"{share:.2%}" if share else "" for share in shares),
    )
