"""Problems of arguments: values that are not finite, and values that a cast collapses."""

import dataclasses
from collections.abc import Iterator

from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.problems import Problem, problem_at
from jmp_train.policies.diagnosing.remedies import Remedy, in_float32

_BEFORE_ALL = -1  # the number of a row that comes before all operations
_REACHED = 0.05  # relative error of a result, or of the backward pass, that a problem has to make

Found = Iterator[tuple[int, Problem]]


def nonfinite_arguments(evidence: Evidence) -> Found:
    """Finds arguments that are not finite; without a NaN from them, as from a mask, they do no harm.

    A lost state has one problem for all leaves.
    """
    harmful = bool(evidence.column("shadow_nan").any())
    lost = list(evidence.lost_state)
    for number, path in evidence.nonfinite_arguments.items():
        rows = [i for i, site in enumerate(evidence.sites) if -1 - number in site.sources]
        if not rows or path in lost[1:]:
            continue
        text, remedy = f"the argument {path!r} is not finite", f"mend {path!r} before the function is called"
        if path in lost:
            more = len(lost) - 1
            text += f", and so {'are' if more > 1 else 'is'} {more} more of the state's leaves" if more else ""
            remedy = "go back to a state that is finite, and diagnose the step that has lost it"
        problem = problem_at(evidence, rows[0], "NaN made", text, Remedy("mathematics", remedy), harmful=harmful)[1]
        if path in lost:  # whichever line reads it first is not to blame
            problem = dataclasses.replace(problem, file="", line=0, subject=f"the argument {path!r}")
        yield _BEFORE_ALL, problem


def collapsed_arguments(evidence: Evidence) -> Found:
    """Finds arguments with different values that a cast makes equal."""
    for row in range(len(evidence.sites)):
        path = evidence.argument(row)
        if text := evidence.collapsed.get(path):
            harmful = evidence.reaches(row, _REACHED)
            yield problem_at(evidence, row, "values collapse", text, in_float32(evidence, row), harmful=harmful)
