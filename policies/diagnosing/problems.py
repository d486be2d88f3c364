"""`Problem`: an operation that half precision harms, with the evidence, and what mends it."""

import dataclasses
import linecache
from typing import Any, Literal

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.policies.diagnosing.equations import Direction
from jmp_train.policies.diagnosing.remedies import Remedy

Kind = Literal[
    "overflow", "underflow", "cancellation", "stagnation", "integer precision lost", "NaN made", "invalid mask"
]
Severity = Literal["problem", "note"]


@dataclasses.dataclass(frozen=True)
class Problem:
    """What half precision does to one line of a function.

    Attributes:
      severity: "problem", or "note" where nothing that is computed from it is harmed.
      kind: what happens.
      direction: in which pass.
      path: of the modules and scopes.
      file: of the user's line.
      line: its number.
      primitive: the operation.
      evidence: what was seen, in numbers.
      remedy: what mends it.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> problem, = jt.diagnose(lambda x: jnp.sum(x * x), jnp.full(3, 300.0, jnp.float16)).problems
      >>> problem.severity, problem.kind, problem.primitive
      ('problem', 'overflow', 'mul')
    """

    severity: Severity
    kind: Kind
    direction: Direction
    path: str
    file: str
    line: int
    primitive: str
    evidence: str
    remedy: Remedy

    @property
    def code(self) -> str:
        """The line itself, where its file can be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""

    def as_dict(self) -> dict[str, Any]:
        """Returns it as a dictionary of what JSON has."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "remedy"}
        remedy = {"action": self.remedy.action, "text": self.remedy.text, "value": self.remedy.value}
        tables = (f.name for f in dataclasses.fields(AutocastRules))
        rules = {name: dict(getattr(self.remedy.rules, name)) for name in tables}
        return fields | {"code": self.code, "remedy": remedy | {"rules": rules}}
