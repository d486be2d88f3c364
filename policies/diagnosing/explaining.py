"""The explanation of a report: a state lost before the run, or the origin of the first infinity."""

from collections.abc import Sequence

import jax.extend.core as jex
import numpy as np

from jmp_train.policies.autocasting import lines_of
from jmp_train.policies.diagnosing.arithmetic import dtype_of
from jmp_train.policies.diagnosing.constants import epsilon_in_code
from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.measures import is_low
from jmp_train.policies.diagnosing.names import named
from jmp_train.policies.diagnosing.problems import Problem, place_of, where_is

_LISTED = 4  # leaves
_DIRECTIONS = {"backward": "Gradients", "forward": "Results", "update": "Results of the update"}


def explanation(evidence: Evidence, found: Sequence[tuple[int, Problem]]) -> str:
    """Returns the explanation of a diagnosis; empty if everything is finite.

    Args:
      evidence: the evidence of the diagnosis.
      found: its problems with their rows.
    """
    return " ".join(filter(None, (_lost_state(evidence), evidence.stuck_scale, _first_nonfinite(evidence, found))))


def _lost_state(evidence: Evidence) -> str:
    paths = evidence.lost_state
    if not paths:
        return ""
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    verb = "is" if len(paths) == 1 else "are"
    return f"The state is lost before this run: {', '.join(map(repr, paths[:_LISTED]))}{more} {verb} not finite."


def _first_nonfinite(evidence: Evidence, found: Sequence[tuple[int, Problem]]) -> str:
    ends, row = _ends_and_origin(evidence, any(problem.severity == "problem" for _, problem in found))
    if row is None:
        return ""
    directions = {evidence.direction(end) for end in ends}
    what = next(text for direction, text in _DIRECTIONS.items() if direction in directions)
    problem = _problem_of(evidence, row, found)
    if problem is None:
        operation = evidence.rows[row]
        place = operation.subject or place_of(operation.file, operation.line)
        return f"{what} are not finite, which begins with {named(evidence, row)}, {place}."
    at, rest = "at" if problem.line else "of", ""
    if problem.severity == "note" and problem.remedy.action == "loss scale":
        rest = ", and ends when the loss scale has fallen"
    elif epsilon := _vanished_epsilon(evidence, row):
        operation = evidence.rows[row]
        share = operation.nan + operation.infinite
        rest = f": {share:.0%} of {named(evidence, row)} are not finite, and its {epsilon} is 0 in {operation.dtype}"
    return f"{what} are not finite, which begins with the {problem.kind} {at} {where_is(problem)}{rest}."


def _vanished_epsilon(evidence: Evidence, row: int) -> str:
    """Returns the epsilon in a library's code that is 0 when added to a row's divisor; otherwise empty."""
    for site in (evidence.sites[i] for i in evidence.sources(row) if evidence.rows[row].primitive == "div"):
        zeros = [x for x in site.equation.invars if isinstance(x, jex.Literal) and is_low(dtype_of(x)) and not x.val]
        lines = lines_of((*site.callers, site.equation)) if zeros and site.equation.primitive.name == "add" else ()
        if line := next((line for line, _ in lines), ""):
            return epsilon_in_code(line, str(dtype_of(zeros[0]))) or ""
    return ""


def _ends_and_origin(evidence: Evidence, is_harmed: bool) -> tuple[list[int], int | None]:
    """Returns the results and gradients that are not finite, and the first row, in the program's order, that caused it.

    If float32 is finite, only values of half precision count; infinities that float32 has too may be intended.

    Args:
      evidence: the evidence of the diagnosis.
      is_harmed: True if there is a problem.
    """
    if not evidence.sites or evidence.lost_state:
        return [], None
    nan, infinite, nan_in_float32 = (evidence.column(name) for name in ("nan", "infinite", "shadow_nan"))
    if evidence.nonfinite_arguments and nan_in_float32.any():
        return [], None
    of_half = nan + infinite > nan_in_float32 + evidence.column("shadow_infinite")
    if ends := [row for row in evidence.ends if of_half[row]]:
        return ends, _origin(evidence, ends, of_half)
    ends = [row for row in evidence.ends if nan[row] and is_harmed]
    return ends, _origin(evidence, ends, nan + infinite > 0) if ends else None


def _origin(evidence: Evidence, ends: list[int], is_lost: np.ndarray) -> int:
    """Returns the first of the lost rows that leads to the ends through other lost rows."""
    reached, new = set(ends), ends
    while new:
        new = [i for row in new for i in evidence.sources(row) if is_lost[i] and i not in reached]
        reached.update(new)
    return min(reached, key=evidence.first_nonfinite)


def _problem_of(evidence: Evidence, row: int, found: Sequence[tuple[int, Problem]]) -> Problem | None:
    """Returns the problem of a row or of its line, otherwise the last earlier one on which it depends."""
    site, before = evidence.sites[row], evidence.before(row)
    same = [problem for i, problem in found if i == row]
    same += [p for _, p in found if p.line and f"{p.file}:{p.line}" == site.line and p.direction == site.direction]
    sources = [(i, problem) for i, problem in found if i in before and problem.severity == "problem"]
    same += [problem for _, problem in sorted(sources, key=lambda item: -item[0])]
    return same[0] if same else None
