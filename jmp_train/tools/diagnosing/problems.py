"""`Problem`: an operation that half precision harms, with evidence and remedy."""

import dataclasses
import linecache
import os
from typing import Any, Literal

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.tools.diagnosing.equations import Direction
from jmp_train.tools.diagnosing.evidence import Evidence
from jmp_train.tools.diagnosing.operation_numerics import is_by_policy, is_of_graphs, is_reduction
from jmp_train.tools.diagnosing.remedies import (
    Remedy,
    float32_argument,
    float32_feature,
    float32_sum,
    full_gradients,
    full_state,
    wide_reduction,
)

Kind = Literal[
    "overflow",
    "underflow",
    "cancellation",
    "stagnation",
    "integer precision lost",
    "decided differently",
    "values collapse",
    "NaN made",
    "invalid mask",
]
Severity = Literal["problem", "note"]
# How float32 does where a NaN is made: it has it too, for the same operands only, or not if all of it is float32.
InFloat32 = Literal["", "too", "same operands", "not"]
_IN_FLOAT32 = {
    "": "",
    "too": ", in float32 too",
    "same operands": ", and so are those of the same operands in float32",
    "not": ", and not where all of it is float32",
}


@dataclasses.dataclass(frozen=True)
class Problem:
    """The harm of half precision at one line of a function.

    Attributes:
      severity: "problem", or "note" if it harms no results.
      kind: the kind of error.
      direction: the pass.
      path: path of modules and scopes.
      file: file of the user's line.
      line: number of the line.
      primitive: the operation.
      evidence: the measurements, as text.
      remedy: the remedy.
      subject: its description if the user has no line for it: an argument's path, the loss, the update of a leaf.
      trial: the outcome of running the function by the report's rules; empty if it was not run.
      in_float32: "too" if float32 makes the NaN too, "same operands" if it does so of the operands here, "not" if a run
        in float32 does not; empty for other problems.

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
    subject: str = ""
    trial: str = ""
    in_float32: InFloat32 = ""

    @property
    def said(self) -> str:
        """The evidence, and the result in float32."""
        return self.evidence + _IN_FLOAT32[self.in_float32]

    @property
    def code(self) -> str:
        """The text of the line, if its file can be read."""
        return linecache.getline(self.file, self.line).strip() if self.line else ""

    def as_dict(self) -> dict[str, Any]:
        """Returns the problem as a dictionary of JSON values."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "remedy"}
        remedy = {"action": self.remedy.action, "text": self.remedy.text, "value": self.remedy.value}
        tables = (f.name for f in dataclasses.fields(AutocastRules))
        rules = {name: dict(getattr(self.remedy.rules, name)) for name in tables}
        return fields | {"code": self.code, "remedy": remedy | {"rules": rules}}


Found = tuple[int, Problem]
"""A problem with the number of its row."""


def worst_first(item: Found) -> tuple[bool, int]:
    """Returns the sort key of a row with its problem: harmful ones before notes, then by execution order.

    Args:
      item: both.
    """
    row, problem = item
    return problem.severity != "problem", row


def where_is(problem: Problem) -> str:
    """Returns the user's line, otherwise the description of the operation."""
    return file_and_line(problem.file, problem.line) if problem.line else problem.subject or "?"


def problem_at(
    evidence: Evidence, row: int, kind: Kind, text: str, remedy: Remedy, *, harmful: bool = True, line: str = ""
) -> Found:
    """Returns a row with its problem.

    Args:
      evidence: the evidence of a diagnosis.
      row: number of the row.
      kind: kind of the problem.
      text: the evidence.
      remedy: remedy of the operation; casts of arguments, reductions over devices and updates have their own.
      harmful: True if it is more than a note.
      line: line of the user's code, if it is not that of the row.
    """
    site = evidence.sites[row]
    file, _, number = (line or site.line).rpartition(":")
    severity: Severity = "problem" if harmful else "note"
    direction = evidence.direction(row)
    if remedy.action == "rules":
        remedy = _by_the_user(evidence, row, remedy, is_whole=kind == "integer precision lost")
    if path := evidence.argument(row):
        lost = "" if kind == "values collapse" else evidence.collapsed.get(path, "")
        said = ": ".join(filter(None, (f"the argument {path!r}" if number else "", lost)))
        text += f" ({said})" if said else ""
    where = direction, site.path, file, int(number or 0), site.equation.primitive.name
    return row, Problem(severity, kind, *where, text, remedy, "" if number else evidence.rows[row].subject)


def _by_the_user(evidence: Evidence, row: int, remedy: Remedy, *, is_whole: bool) -> Remedy:
    """Returns the remedy for an operation that autocast rules do not reach, or that is better fixed without them."""
    site, path = evidence.sites[row], evidence.argument(row)
    direction = evidence.direction(row)
    if path and (is_by_policy(site) or not site.line) and not site.under_autocast:
        is_parameter = path.startswith("0") and path != "0"
        if any(is_of_graphs(evidence.sites[reader]) for reader in evidence.readers(row)) and not is_parameter:
            return float32_feature(path)
        return float32_argument(path, evidence.rows[row].dtype, is_parameter=is_parameter, is_whole=is_whole)
    if is_reduction(site):
        return wide_reduction()
    if site.equation.primitive.name.startswith("psum"):
        return float32_sum(remedy if direction == "forward" else None)
    if direction == "update":
        # Where the state is in half, optax casts moments back to that, whatever the gradients are.
        is_stored = evidence.low_results & {row, *evidence.after(row)}
        return full_state(evidence.rows[row].dtype) if is_stored else full_gradients()
    return remedy


def file_and_line(file: str, line: int) -> str:
    """Returns file and line, from the current folder if it is below that.

    Args:
      file: path of the file.
      line: number of the line; 0 if unknown.

    Example:
      >>> file_and_line("", 0)
      '?'
    """
    if not line:
        return "?"
    path = os.path.relpath(file)
    return f"{file if path.startswith('..') else path}:{line}"
