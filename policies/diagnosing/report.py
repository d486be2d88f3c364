"""`NumericsReport`: what `diagnose` returns, as text, as a table in notebooks, as JSON."""

import dataclasses
import html
import json
import math
import textwrap
from typing import Any

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.policies.diagnosing.page import page
from jmp_train.policies.diagnosing.problems import Problem, where_is
from jmp_train.policies.diagnosing.remedies import merged_rules
from jmp_train.policies.diagnosing.rows import OperationNumerics

_HOW_TO_APPLY = (
    "rules.replace(...) is of AutocastRules, and report.rules has all of these, for "
    "AutocastPolicy(..., rules=report.rules)"
)
_WIDTH = 100


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
        return finite_or_none(found)

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
        entries = merged_rules([problem.remedy for problem in self._harmful], AutocastRules())
        summary = f"{self._summary}. {self.explanation}".strip()
        found = self.problems, self.rows
        return page(title, summary, *found, collapsed=self.collapsed, rules=entries, steps=self.steps)

    @property
    def _harmful(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "problem"]

    @property
    def _summary(self) -> str:
        half = sum(row.dtype.startswith(("float16", "bfloat16", "float8")) for row in self.rows)
        count = f"{len(self.rows)} operation{'s' * (len(self.rows) != 1)}, {half} of them in half precision"
        harmful = len(self._harmful)
        return f"{harmful or 'no'} problem{'s' * (harmful != 1)} in {count}"

    def __str__(self) -> str:
        lines = [self._summary, *_wrapped(self.explanation, "")]
        for problem in self.problems:
            lines += _lines(problem)
        if any(problem.remedy.action == "rules" for problem in self._harmful):
            lines += _wrapped(_HOW_TO_APPLY, "")
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = ("", "what", "pass", "where", "code", "evidence", "what mends it")
        cells = "".join(f"<th>{name}</th>" for name in head)
        body = "".join(f"<tr>{''.join(f'<td>{html.escape(c)}</td>' for c in _cells(p))}</tr>" for p in self.problems)
        summary = f"<p>{html.escape(self._summary)}</p><p>{html.escape(self.explanation)}</p>"
        return f"{summary}<table><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table>"


def _cells(problem: Problem) -> tuple[str, ...]:
    where = f"{where_is(problem)} {problem.path}".strip()
    return (
        problem.severity,
        problem.kind,
        problem.direction,
        where,
        problem.code,
        problem.evidence,
        f"{problem.remedy} {problem.trial}".strip(),
    )


def _lines(problem: Problem) -> list[str]:
    where = where_is(problem) + (f" ({problem.path})" if problem.path else "")
    head = f"{problem.severity}: {problem.kind}, {problem.direction} pass, {where}"
    code = [f"    {problem.code}"[:_WIDTH]] if problem.code else []
    return [
        *_wrapped(head, ""),
        *code,
        *_wrapped(problem.evidence, "  "),
        *_wrapped(f"-> {problem.remedy}", "  "),
        *_wrapped(problem.trial, "  "),
    ]


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def finite_or_none(value: Any) -> Any:
    """Returns what JSON has: tuples as lists, numbers that are not finite as None."""
    if isinstance(value, dict):
        return {name: finite_or_none(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_or_none(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
