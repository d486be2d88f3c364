"""Errors without a single cause: results far from float32's, and infinities from growing errors."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from jmp_train.policies.diagnosing.amplifying import addition_before, gradients_error, terms_error
from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.measures import is_float, is_low
from jmp_train.policies.diagnosing.names import named
from jmp_train.policies.diagnosing.problems import Problem, problem_at
from jmp_train.policies.diagnosing.remedies import operands_in_float32

_WRONG = 0.5  # relative error of a result
_LOST_DIGITS = 0.1  # relative error of one operation that has lost its result's digits
_ROUNDING = 1e-3  # relative error that operands have at least

Named = Mapping[Any, tuple[int, Problem]]
Found = Iterator[tuple[int, Problem]]


def grown_infinities(known: Named, evidence: Evidence) -> Found:
    """Finds infinities that grew from errors of operands, if no problem explains the errors.

    Args:
      known: rows with their problems.
      evidence: the evidence of a diagnosis.
    """
    for i in evidence.first_to_be("infinite"):
        row = evidence.rows[i]
        is_local = row.overflowed or is_undefined_at_zero(evidence, i)
        if is_local or evidence.column("shadow_infinite")[i] or _is_explained(known, evidence, i):
            continue
        text = f"{row.infinite:.2%} of {named(evidence, i)} are infinite, and not in float32: operands that are off"
        remedy = operands_in_float32(evidence, i)
        yield problem_at(evidence, i, "overflow", text, remedy, harmful=evidence.spreads(i))


def is_undefined_at_zero(evidence: Evidence, row: int) -> bool:
    """Returns whether an operation returns infinities or NaN for zeros."""
    equation = evidence.sites[row].equation
    name = equation.primitive.name
    return name in ("div", "log", "pow", "rsqrt") or (name == "integer_pow" and equation.params["y"] < 0)


def wrong_results(known: Named, evidence: Evidence) -> Found:
    """Finds a loss or, without a backward pass, a result with a large error, and its origin.

    Args:
      known: rows with their problems; a harmful one explains the errors that depend on it.
      evidence: the evidence of a diagnosis.
    """
    has_gradients = any(site.direction == "backward" for site in evidence.sites)
    for end in sorted(evidence.results):
        is_result = evidence.direction(end) == "forward" and is_float(evidence.rows[end].dtype)
        is_candidate = is_result and (not has_gradients or evidence.rows[end].shape == ())
        row = _beginning(evidence, end) if is_candidate and _is_wrong(evidence, end) else None
        if row is None or _is_explained(known, evidence, end):
            continue
        off = _times(evidence.rows[end].inherited_error)
        gradients = f", the gradients by {_times(gradients_error(evidence))}" if has_gradients else ""
        text = (
            f"{'the loss' if has_gradients else 'a result'} is off by {off}{gradients}, most of which begins here: "
            f"{named(evidence, row)} is off by {_times(evidence.rows[row].inherited_error)}, its operands by "
            f"{_operands_error(evidence, row):.1%}"
        )
        remedy = operands_in_float32(evidence, row)
        yield problem_at(evidence, addition_before(evidence, row), "cancellation", text, remedy)


def _is_explained(known: Named, evidence: Evidence, row: int) -> bool:
    return not evidence.before(row).isdisjoint(i for i, problem in known.values() if problem.severity == "problem")


def _is_wrong(evidence: Evidence, end: int) -> bool:
    """Returns whether a result or the gradients are wrong, and the terms of a scalar too."""
    error, terms = evidence.rows[end].inherited_error, terms_error(evidence, end)
    if evidence.rows[end].shape == ():
        return terms > _WRONG and max(error, gradients_error(evidence)) > _WRONG
    return error > _WRONG


def _beginning(evidence: Evidence, end: int) -> int | None:
    """Returns the operation that loses most digits by itself, otherwise the one with the most exact operands."""
    before = [i for i in evidence.before(end) if evidence.direction(i) == "forward"]
    before = [i for i in before if math.isfinite(evidence.rows[i].inherited_error)]  # it is infinite of what is 0
    lost = [i for i in before if evidence.rows[i].local_error > _LOST_DIGITS and is_low(evidence.rows[i].dtype)]
    if lost:
        return max(lost, key=lambda i: evidence.rows[i].local_error)
    return max(before, key=lambda i: evidence.rows[i].inherited_error / _operands_error(evidence, i), default=None)


def _operands_error(evidence: Evidence, row: int) -> float:
    return max([_ROUNDING, *(evidence.rows[i].inherited_error for i in evidence.sources(row))])


def _times(error: float) -> str:
    return f"{error:.1%}" if error < 10 else f"{error:.3g} times itself"
