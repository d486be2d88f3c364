"""`NumericsReport`: what `diagnose` returns, as text, as a table in notebooks, as JSON."""

import dataclasses
import json
from typing import Any

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.policies.diagnosing.page import diagnosis_page, problem_table, text_blocks
from jmp_train.policies.diagnosing.problems import Problem
from jmp_train.policies.diagnosing.remedies import merged_rules
from jmp_train.policies.diagnosing.rows import OperationNumerics
from jmp_train.policies.documents import Text, as_json, counted, fragment, text


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
        entries = merged_rules([problem.remedy for problem in self._harmful], AutocastRules())
        summary = f"{self._summary}. {self.explanation}".strip()
        found = self.problems, self.rows
        return diagnosis_page(title, summary, *found, collapsed=self.collapsed, rules=entries, steps=self.steps)

    @property
    def _harmful(self) -> list[Problem]:
        return [problem for problem in self.problems if problem.severity == "problem"]

    @property
    def _summary(self) -> str:
        half = sum(row.dtype.startswith(("float16", "bfloat16", "float8")) for row in self.rows)
        harmful = counted(len(self._harmful), "problem") if self._harmful else "no problems"
        return f"{harmful} in {counted(len(self.rows), 'operation')}, {half} of them in half precision"

    def __str__(self) -> str:
        return text([Text(self._summary), Text(self.explanation), *text_blocks(self.problems)])

    def _repr_html_(self) -> str:
        return fragment([Text(self._summary), Text(self.explanation), problem_table(self.problems)])
