"""`NumericsReport`: what `diagnose` returns, as text, as a table in notebooks, as JSON."""

import dataclasses
import json
from typing import Any

from jmp_train.policies.autocasting import AutocastRules, rules_code
from jmp_train.policies.diagnosing.chart import errors_chart
from jmp_train.policies.diagnosing.places import place_of
from jmp_train.policies.diagnosing.problems import Problem, where_is
from jmp_train.policies.diagnosing.remedies import merged_rules
from jmp_train.policies.diagnosing.rows import OperationNumerics
from jmp_train.policies.documents import Code, Section, Table, Text, as_json, counted, fragment, page, text

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


@dataclasses.dataclass(frozen=True)
class NumericsReport:
    """What half precision does to each operation of a function.

    Attributes:
      problems: worst first; what harms before notes, and of these what happens first.
      rows: an operation each, in the order in which they run.
      collapsed: path of an argument's leaf -> what its values lose when they are cast, as `check_casts` says.
      steps: how often the function was run.
      explanation: what the rest comes of: a state that was lost before, or where the first value that is not finite is
        made; empty where all is finite.

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

    @property
    def rules(self) -> AutocastRules:
        """Torch's autocast rules with the entries that mend the problems."""
        return merged_rules([problem.remedy for problem in self._harmful])

    def as_dict(self) -> dict[str, Any]:
        """Returns all of it as JSON has it: numbers that are not finite are None."""
        found = {
            "problems": [problem.as_dict() for problem in self.problems],
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "collapsed": self.collapsed,
            "steps": self.steps,
            "explanation": self.explanation,
        }
        return as_json(found)

    def to_json(self) -> str:
        """Returns all of it as JSON; numbers that are not finite are null."""
        return json.dumps(self.as_dict(), allow_nan=False)

    def to_html(self, title: str = "Diagnosis") -> str:
        """Returns all of it as an HTML page that needs no network: problems, a picture of the errors, all operations.

        Args:
          title: of the page, such as what was diagnosed.

        Example:
          >>> import pathlib, tempfile
          >>> import jax.numpy as jnp, jmp_train as jt
          >>> report = jt.diagnose(lambda x: x * x, jnp.full(3, 300.0, jnp.float16))
          >>> file = pathlib.Path(tempfile.mkdtemp()) / "diagnosis.html"
          >>> file.write_text(report.to_html("squares"), encoding="utf-8") > 1000
          True
        """
        code = rules_code(merged_rules([problem.remedy for problem in self._harmful], AutocastRules()))
        use = 'policy = dataclasses.replace(jt.get_policy("autocast_float16"), rules=rules)'
        ordered = sorted(enumerate(self.rows, 1), key=lambda item: -item[1].local_error)
        operations = Table(_HEADS, [_row(number, row) for number, row in ordered], "operations", texts=range(7))
        return page(
            title,
            [
                Text(f"{self._summary}. {self.explanation}".strip(), "summary"),
                *(Text(f"Argument {path}: {said}.") for path, said in self.collapsed.items()),
                errors_chart(self.rows, self.problems),
                Section("Problems", [_problem(*item) for item in enumerate(self.problems, 1)], "problems"),
                Section("Rules that mend the problems", [Code(f"{code}\n{use}" if code else "", "rules")]),
                Section("Operations", [Text(_LARGEST, look="soft"), operations]),
            ],
            [f"{_ERRORS}{'one run' if self.steps == 1 else f'{self.steps} runs'}."],
        )

    @property
    def _harmful(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "problem"]

    @property
    def _summary(self) -> str:
        half = sum(row.dtype.startswith(("float16", "bfloat16", "float8")) for row in self.rows)
        harmful = counted(len(self._harmful), "problem") if self._harmful else "no problems"
        return f"{harmful} in {counted(len(self.rows), 'operation')}, {half} of them in half precision"

    def __str__(self) -> str:
        has_rules = any(problem.remedy.action == "rules" for problem in self._harmful)
        how = Text(_HOW_TO_APPLY if has_rules else "")
        return text([Text(self._summary), Text(self.explanation), *map(_printed, self.problems), how])

    def _repr_html_(self) -> str:
        heads = ("", "what", "pass", "where", "code", "evidence", "what mends it")
        rows = [
            (p.severity, p.kind, p.direction, _where(p), p.code, p.evidence, f"{p.remedy} {p.trial}".strip())
            for p in self.problems
        ]
        return fragment([Text(self._summary), Text(self.explanation), Table(heads, rows, texts=range(7))])


def _printed(problem: Problem) -> Section:
    where = where_is(problem) + (f" ({problem.path})" if problem.path else "")
    head = f"{problem.severity}: {problem.kind}, {problem.direction} pass, {where}"
    return Section(head, [Code(problem.code), *map(Text, (problem.evidence, f"-> {problem.remedy}", problem.trial))])


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
