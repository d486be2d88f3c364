"""Finds whole numbers and booleans that half precision decides differently than float32, and that change results.

A shadow that decides for itself, in place of the actual whole numbers, has the results that they would have had.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence

from jmp_train.policies.autocasting import AutocastRules
from jmp_train.tools.diagnosing.amplifying import (
    GRADIENTS,
    FunctionErrors,
    error_limit,
    errors_of,
    named_row,
)
from jmp_train.tools.diagnosing.arithmetic import decides, is_discrete, picks
from jmp_train.tools.diagnosing.evidence import Evidence
from jmp_train.tools.diagnosing.examining import Examination
from jmp_train.tools.diagnosing.problems import Found, file_and_line, problem_at
from jmp_train.tools.diagnosing.remedies import Remedy, everything_before, operands_in_float32

LEFT = 0.25  # of an error, or of a share, with which a search ends
MENDED = 1.5  # times that an error becomes smaller, at least
_SHARE = 0.01  # of the elements of a comparison that are decided differently: fewer change little
_WRONG = 0.01  # relative error of results or gradients by decisions that differ
_LINES = 3  # that are examined alone

Again = Callable[[AutocastRules], Examination | None]


def harmful_decisions(first: Examination) -> list[tuple[int, FunctionErrors]]:
    """Returns the rows of decisions that make results or gradients wrong, one per line, with the errors that they make.

    Args:
      first: the examination of the unchanged function.
    """
    lines = _by_line(first)
    every = [row for rows in lines for row in rows]
    if not lines or not _is_harmful(first, every, own := _of_own(first, every)):
        return []
    worst = sorted(lines, key=lambda rows: -_share(first.evidence, rows[0]))[:_LINES]
    alone = [(rows, _of_own(first, rows)) for rows in worst] if len(lines) > 1 else []
    harmful = [(rows, found) for rows, found in alone if _is_harmful(first, rows, found)]
    return [(rows[0], _errors(found)) for rows, found in harmful or [(lines[0], own)]]


def errors_with_decisions(examination: Examination) -> FunctionErrors:
    """Returns the errors of a function relative to a float32 function that decides for itself.

    Args:
      examination: its examination.
    """
    rows = [row for line in _by_line(examination) for row in line]
    return _errors(_of_own(examination, rows) if rows else examination)


def share_left(first: Examination, row: int, last: Examination) -> float:
    """Returns the fraction of elements that rules leave decided differently, relative to the share without them.

    Args:
      first: the examination of the unchanged function.
      row: row of the decision.
      last: the examination of the function that runs by rules.
    """
    place = _place(first.evidence, row)
    after = [_share(last.evidence, i) for i in range(len(last.evidence.rows)) if _place(last.evidence, i) == place]
    return max(after, default=0.0) / _share(first.evidence, row)


def _by_line(examination: Examination) -> list[list[int]]:
    """Returns the rows of decisions that differ, the ones of a line together and the largest share first."""
    evidence = examination.evidence
    lines: dict[str | int, list[int]] = {}
    for row, site in enumerate(evidence.sites):
        is_examined = not examination.has_effects and evidence.direction(row) == "forward"
        # One of several iterations suffices to decide, as in a binary search.
        share = 0.0 if is_discrete(site.equation) else _SHARE
        if is_examined and decides(site.equation) and _share(evidence, row) * evidence.rows[row].runs > share:
            lines.setdefault(site.line or row, []).append(row)
    return [sorted(rows, key=lambda row: -_share(evidence, row)) for rows in lines.values()]


def _of_own(examination: Examination, rows: Sequence[int]) -> Examination:
    """Returns the examination with a shadow that computes some decisions, also in other passes, for itself.

    Those that are computed from these and constants only go with them, as an index with the whole number that is cast.
    """
    evidence = examination.evidence
    places, own = {_place(evidence, row) for row in rows}, set[int]()
    for row, site in enumerate(evidence.sites):
        if _place(evidence, row) in places or site.sources <= own:
            own.add(row)
    return examination.again(frozenset(row for row in own if decides(evidence.sites[row].equation)))


def _errors(examination: Examination) -> FunctionErrors:
    """Returns the errors of a function; without gradients those of all results, each as a norm."""
    errors = errors_of(examination.evidence)
    is_plain = errors.gradients is None
    return dataclasses.replace(errors, results=max(examination.apart, default=0.0)) if is_plain else errors


def _is_harmful(first: Examination, rows: Sequence[int], own: Examination) -> bool:
    """Returns whether decisions make gradients wrong or, without finite ones, results, given a shadow of its own ones.

    A comparison alone may select one of two equal numbers, as in a rectifier, whose result it does not change. A metric
    without a gradient, such as an accuracy, does not count.
    """
    before, errors, limit = _errors(first), _errors(own), error_limit(first.evidence)
    if _has_nan(first) and not _has_nan(own):
        return True  # as of an index out of range
    if errors.gradients is None:
        held, made = (max(filter(math.isfinite, apart), default=0.0) for apart in (first.apart, own.apart))
        is_lost = any(math.isinf(after) > math.isinf(held) for held, after in zip(first.apart, own.apart, strict=True))
        return is_lost or made > max(limit, MENDED * held)
    if not math.isfinite(errors.gradients):
        return errors.results > max(limit, MENDED * before.results)
    changes_results = errors.results > max(_WRONG, MENDED * before.results)
    of_indices = any(is_discrete(first.evidence.sites[row].equation) for row in rows)
    held, tolerated = before.gradients or 0.0, max(limit, GRADIENTS)
    if of_indices and errors.gradients > math.hypot(held, tolerated):
        return True  # they make more than is tolerated, whatever the rounding around them makes
    return errors.gradients > max(_WRONG if of_indices or changes_results else tolerated, MENDED * held)


def _has_nan(examination: Examination) -> bool:
    """Returns whether results of the shadow are NaN."""
    evidence = examination.evidence
    return bool(evidence.column("shadow_nan")[sorted(evidence.results)].any())


def decision_problem(first: Examination, row: int, errors: FunctionErrors, again: Again) -> Found:
    """Returns the problem of a decision, with the row where its operands' errors begin.

    Args:
      first: the examination of the unchanged function.
      row: row of the decision.
      errors: the errors that it makes.
      again: returns the examination of the function that runs by rules, or None.
    """
    evidence = first.evidence
    is_compared, begin = picks(evidence.sites[row].equation), named_row(evidence, row)
    said = "decided differently than in float32" if is_compared else "other whole numbers than those of float32"
    found = evidence.rows[row]
    at = "" if evidence.sites[begin].line == evidence.sites[row].line else f" ({file_and_line(found.file, found.line)})"
    text = f"{found.decided:.2%} of {evidence.named(row)}{at} are {said}, with which {errors}"
    kind = "decided differently" if is_compared else "integer precision lost"
    return problem_at(evidence, begin, kind, text, _remedy(first, row, again))


def _remedy(first: Examination, row: int, again: Again) -> Remedy:
    """Returns the least rules with which hardly any element is decided differently, otherwise the first ones."""
    evidence = first.evidence
    near, far = (operands_in_float32(evidence, row, shared=True, products=products) for products in (False, True))
    for remedy in (near, far, everything_before(evidence, row)):
        run = again(remedy.rules)
        if run is None:
            break
        if share_left(first, row, run) <= LEFT:
            return remedy
    return near


def _share(evidence: Evidence, row: int) -> float:
    return evidence.rows[row].decided


def _place(evidence: Evidence, row: int) -> tuple[str, str]:
    site = evidence.sites[row]
    return site.line or str(row), site.equation.primitive.name
