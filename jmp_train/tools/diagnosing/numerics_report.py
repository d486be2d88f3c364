"""`NumericsReport`: the result of `diagnose`, with its text, its page, its chart and its JSON."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from jmp_train.policies.autocasting import TORCH_CUDA, AutocastRules, rules_code
from jmp_train.tools import documents as doc
from jmp_train.tools.diagnosing.operation_numerics import OperationNumerics
from jmp_train.tools.diagnosing.problems import Problem, file_and_line, where_is
from jmp_train.tools.diagnosing.remedies import NO_RULES, merged

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
_AXIS = doc.log_axis([1e-8, 10.0], "{:.0e}".format)  # errors beyond these are drawn at the edge
_SHADES = {"backward": doc.Style("shade"), "update": doc.Style("tint")}
_MARKS = {"problem": doc.Style("bad", is_hollow=True), "note": doc.Style(is_hollow=True)}
_HOW_TO_APPLY = (
    "rules.replace(...) is of AutocastRules, and report.rules has all of these, for "
    "AutocastPolicy(..., rules=report.rules)"
)


@dataclasses.dataclass(frozen=True)
class NumericsReport:
    """The effect of half precision on each operation of a function.

    Attributes:
      problems: the problems, worst first: harmful ones before notes, then in the order of execution.
      rows: one per operation, in the order of execution.
      collapsed: path of an argument's leaf -> the loss of its values when they are cast, see `check_casts`.
      steps: number of runs of the function.
      explanation: the cause of non-finite results: a state that was lost before, or the operation with the first
        non-finite value; and how the device of the diagnosis rounds products. Empty if there is neither.
      base: the rules of the function's first autocast region that the trials have reached; torch's without any.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> report = jt.diagnose(lambda x: jnp.exp(x), jnp.full(3, 2.0, jnp.float16))
      >>> print(report)
      no problems in 1 operation, 1 of them in half precision
    """

    problems: tuple[Problem, ...]
    rows: tuple[OperationNumerics, ...]
    collapsed: dict[str, str]
    steps: int
    explanation: str = ""
    base: AutocastRules = TORCH_CUDA

    @property
    def rules(self) -> AutocastRules:
        """The function's autocast rules, torch's without any, with the entries that fix the problems."""
        return merged(self.base, *(problem.remedy.rules for problem in self._harmful))

    def as_dict(self) -> dict[str, Any]:
        """Returns the report as JSON values; non-finite numbers are None."""
        fields = {name: value for name, value in vars(self).items() if name != "base"}
        return doc.as_json(fields | {"problems": [problem.as_dict() for problem in self.problems]})

    def to_json(self) -> str:
        """Returns the report as JSON; non-finite numbers are null."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def to_html(self, title: str = "Diagnosis") -> str:
        """Returns the report as an HTML page that needs no network: problems, a chart of the errors, all operations.

        Args:
          title: title of the page, such as the name of the function.

        Example:
          >>> import pathlib, tempfile
          >>> import jax.numpy as jnp, jmp_train as jt
          >>> report = jt.diagnose(lambda x: x * x, jnp.full(3, 300.0, jnp.float16))
          >>> file = pathlib.Path(tempfile.mkdtemp()) / "diagnosis.html"
          >>> file.write_text(report.to_html("squares"), encoding="utf-8") > 1000
          True
        """
        code = rules_code(merged(NO_RULES, *(problem.remedy.rules for problem in self._harmful)))
        use = 'policy = dataclasses.replace(jt.get_policy("autocast_float16"), rules=rules)'
        ordered = sorted(enumerate(self.rows, 1), key=lambda item: -item[1].local_error)
        operations = doc.Table(_HEADS, [_row(number, row) for number, row in ordered], "operations", texts=range(7))
        return doc.page(
            title,
            [
                *self._head,
                *(doc.Text(f"Argument {path}: {said}.") for path, said in self.collapsed.items()),
                errors_chart(self.rows, self.problems),
                doc.Section("Problems", self._numbered, "problems"),
                doc.Section("Rules that mend the problems", [doc.Code(f"{code}\n{use}" if code else "", "rules")]),
                doc.Section("Operations", [doc.Text(_LARGEST, look="soft"), operations]),
            ],
            [f"{_ERRORS}{doc.counted(self.steps, 'run')}."],
        )

    @property
    def _harmful(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "problem"]

    @property
    def _head(self) -> list[doc.Element]:
        half = sum(row.dtype.startswith(("float16", "bfloat16", "float8")) for row in self.rows)
        harmful = doc.counted(len(self._harmful), "problem") if self._harmful else "no problems"
        operations = doc.counted(len(self.rows), "operation")
        return [doc.Text(f"{harmful} in {operations}, {half} of them in half precision"), doc.Text(self.explanation)]

    @property
    def _numbered(self) -> list[doc.Section]:
        """The problems with the numbers of their marks in the chart, and with rules to copy."""
        return [_section(problem, number) for number, problem in enumerate(self.problems, 1)]

    def __str__(self) -> str:
        has_rules = any(problem.remedy.action == "rules" for problem in self._harmful)
        return doc.text([*self._head, *map(_section, self.problems), doc.Text(_HOW_TO_APPLY if has_rules else "")])

    def _repr_html_(self) -> str:
        return doc.fragment([*self._head, errors_chart(self.rows, self.problems), *self._numbered])


def _section(problem: Problem, number: int = 0) -> doc.Section:
    """Returns the section of a problem; with a number, also its rules to copy."""
    where = where_is(problem) + (f" ({problem.path})" if problem.path else "")
    title = f"{f'{number}. ' * bool(number)}{problem.severity}: {problem.kind}, {problem.direction} pass, {where}"
    said = (problem.said, f"-> {problem.remedy}", problem.trial)
    rules = doc.Code(rules_code(problem.remedy.rules)) if number else None
    blocks = [doc.Code(problem.code), *map(doc.Text, said), rules]
    return doc.Section(title, blocks, f"problem-{number}", problem.severity)


def _row(number: int, row: OperationNumerics) -> tuple[str, ...]:
    dtypes = f"{', '.join(dict.fromkeys(row.dtypes_in))} → {row.dtype}"
    shares = (row.overflowed, row.flushed, row.subnormal, row.nan, row.infinite, row.lost_terms)
    errors = (row.local_error, row.inherited_error, row.largest, row.smallest)
    return (
        str(number),
        *(row.primitive, row.direction, row.path, row.subject or file_and_line(row.file, row.line), dtypes),
        *(",".join(map(str, row.shape)), str(row.runs)),
        *(f"{x:.2g}" if x else "" for x in errors),
        *(f"{share:.2%}" if share else "" for share in shares),
    )


def errors_chart(rows: Sequence[OperationNumerics], problems: Sequence[Problem]) -> doc.Chart | None:
    """Returns a dash per operation for its inherited error, another for its local one, and marks for problems.

    Errors of zero are left out. Operations whose results are NaN or infinite have a red dash at the top.

    Args:
      rows: the rows in the order of execution; without any there is no chart.
      problems: the problems, marked by their numbers from 1.
    """
    if not rows:
        return None
    marks = [
        *_passes(rows),
        doc.dashes(doc.Style("first", "inherited error"), [row.inherited_error for row in rows]),
        doc.dashes(doc.Style("second", "local error"), [row.local_error for row in rows]),
        doc.dashes(
            doc.Style("bad", "NaN or infinite", width=6), [_AXIS.high * bool(row.nan or row.infinite) for row in rows]
        ),
        *_marks(rows, problems),
    ]
    title = "Local and inherited error of each operation, in the order in which they run"
    return doc.Chart(title, doc.Axis(0, len(rows)), _AXIS, marks, (1000, 312), (42, 10, 22, 40))


def _passes(rows: Sequence[OperationNumerics]) -> Iterator[doc.Mark]:
    """Yields a shade behind the operations of each pass, and its name below the longest part of it."""
    longest: dict[str, tuple[int, int]] = {}
    start = 0
    for direction, group in groupby(row.direction for row in rows):
        count = len(list(group))
        if direction in _SHADES:
            yield doc.Box(_SHADES[direction], start, start + count, _AXIS.low, _AXIS.high)
        longest[direction] = max(longest.get(direction, (0, 0)), (count, start))
        start += count
    for direction, (_, first) in longest.items():
        yield doc.Label(direction, first, _AXIS.low, shift=(4, 15))


def _marks(rows: Sequence[OperationNumerics], problems: Sequence[Problem]) -> Iterator[doc.Mark]:
    """Yields a mark for each problem, with a link to its section."""
    for number, problem in enumerate(problems, 1):
        place = row_of_problem(rows, problem)
        if place is None:
            continue
        row = rows[place]
        error = max(row.local_error, row.inherited_error)
        y = _AXIS.high if row.nan or row.infinite or not error > 0 else error
        said = f"{problem.kind}: {problem.said}"
        yield doc.Dot(_MARKS[problem.severity], place + 0.5, y, 8, said, str(number), f"#problem-{number}")


def row_of_problem(rows: Sequence[OperationNumerics], problem: Problem) -> int | None:
    """Returns the number of the most likely row of a problem's line; None if the line has no row.

    Args:
      rows: the rows of the diagnosis.
      problem: one of its problems.
    """

    def likeness(i: int) -> tuple[bool, bool, bool]:
        row = rows[i]
        return row.primitive == problem.primitive, row.path == problem.path, row.direction == problem.direction

    there = [i for i, row in enumerate(rows) if (row.file, row.line) == (problem.file, problem.line)]
    return max(there, key=likeness, default=None)
