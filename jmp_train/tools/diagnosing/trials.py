"""Tries the proposals of a diagnosis: runs the function by the rules, completes them, and records the outcome."""

import collections
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from jmp_train.policies.autocasting import TORCH_CUDA, AutocastRules, autocast, flops_of, trying
from jmp_train.policies.programs import repeats_of
from jmp_train.tools.diagnosing.amplifying import (
    FunctionErrors,
    amplification,
    amplifiers,
    error_limit,
    errors_of,
    is_off,
)
from jmp_train.tools.diagnosing.deciding import (
    LEFT,
    MENDED,
    Again,
    decision_problem,
    errors_with_decisions,
    harmful_decisions,
    share_left,
)
from jmp_train.tools.diagnosing.evidence import Evidence
from jmp_train.tools.diagnosing.examining import Examination, examine
from jmp_train.tools.diagnosing.measures import is_float, is_low
from jmp_train.tools.diagnosing.operation_numerics import is_by_policy
from jmp_train.tools.diagnosing.problems import Found, Problem, worst_first
from jmp_train.tools.diagnosing.remedies import (
    NO_RULES,
    Remedy,
    everything_before,
    in_float32,
    lacks,
    merged,
)

_ROUNDS = 4  # in which rules are completed
_CANDIDATES = (8, 3)  # sets of rules that are tried where no operation stands out, and once the best is followed
_AS_GOOD = 2  # times the error that the best rules leave
_EVERYTHING = AutocastRules(paths=(("", "float32"),))

ProblemPlace = tuple[str, int, str, str]


def examine_by_rules(
    first: Examination, fn: Callable[..., Any], args: tuple[Any, ...], added: AutocastRules, own: list[AutocastRules]
) -> Examination | None:
    """Returns the examination of a function that runs by rules; None if no rules reach it.

    Its autocast regions and half-precision policies add the rules to theirs; without any it runs under autocast. A
    function with effects runs only once.

    Args:
      first: the examination of the unchanged function.
      fn: the function.
      args: its arguments.
      added: autocast rules.
      own: list to which the rules of its regions and policies are added.
    """
    half = _half_type(first.evidence)
    if half is None or first.has_effects:
        return None
    if any(site.under_autocast or is_by_policy(site) for site in first.evidence.sites):

        def by_rules(*args: Any) -> Any:
            with trying(added) as trial:
                results = fn(*args)
            own.extend(trial.taken)
            return results

    elif any(first.evidence.direction(row) == "update" for row in range(len(first.evidence.rows))):
        return None  # a step that casts for itself
    else:
        by_rules = autocast(fn, half, rules=merged(TORCH_CUDA, added))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which the user was told of the function as it is
        try:
            return examine(by_rules, args, first.steps, first.rounding)
        except Exception:  # noqa: BLE001  # code that has dtypes of its own need not run by rules
            return None


def _half_type(evidence: Evidence) -> str | None:
    """Returns the half type of most operations; None if there is none."""
    counts = collections.Counter(row.dtype for row in evidence.rows if row.dtype in ("float16", "bfloat16"))
    return counts.most_common(1)[0][0] if counts else None


def with_trials(first: Examination, again: Again) -> list[Found]:
    """Returns the problems of a function with complete rules and their outcome.

    Args:
      first: the examination of the unchanged function.
      again: returns the examination of the function that runs by rules, or None.
    """
    decided = harmful_decisions(first)
    found, last = _completed(_checked_in_float32(first, again), again)
    found, last = _amplified(first, found, last, again)
    wrong = {row for row, problem in found if problem.severity == "problem"}
    own = [
        (decision_problem(first, row, errors, again), row)
        for row, errors in decided
        if not (wrong & first.evidence.before(row) and last is not None and share_left(first, row, last) <= LEFT)
    ]  # decisions that the rules of an earlier problem put right have inherited its error
    if own:
        found, last = _completed(sorted([*found, *(item for item, _ in own)], key=worst_first), again)
    if last is None:
        return found
    before, after = (errors_with_decisions(x) if decided else errors_of(x.evidence) for x in (first, last))
    left = {_place(problem) for _, problem in last.found if problem.severity == "problem"}
    left |= {_place(problem) for (_, problem), row in own if share_left(first, row, last) > LEFT}
    in_half = [f"{_half_flops(x.evidence):.1%}" for x in (last, first)]
    shares = f"; in half precision: {in_half[0]} of the flops (before: {in_half[1]})"
    return [(row, _with_outcome(problem, before, after, last, left, shares)) for row, problem in found]


def _checked_in_float32(first: Examination, again: Again) -> list[Found]:
    """Returns the problems, with a note for those that a float32 run has too."""
    too = [problem for _, problem in first.found if problem.in_float32 == "too"]
    if not too or not any(row.dtype in ("float16", "bfloat16") for row in first.evidence.rows):
        return first.found
    exact = again(_EVERYTHING)
    places = (
        {_place(problem) for _, problem in exact.found if problem.in_float32 == "too"} if exact else set[ProblemPlace]()
    )

    def checked(row: int, problem: Problem) -> Problem:
        if problem not in too or _place(problem) in places:
            return problem
        if exact is None:
            return dataclasses.replace(problem, in_float32="same operands")
        return dataclasses.replace(problem, in_float32="not", remedy=in_float32(first.evidence, row))

    return [(row, checked(row, problem)) for row, problem in first.found]


def _completed(found: list[Found], again: Again) -> tuple[list[Found], Examination | None]:
    """Returns the problems with all rules that their function needs, and its examination under these."""
    last = None
    for _ in range(_ROUNDS):
        rules = _rules_of(found)
        last = again(rules) if rules != NO_RULES else None
        if last is None:
            break
        known = merged(TORCH_CUDA, rules)
        more = [problem for _, problem in last.found if is_tried(problem) and lacks(known, problem.remedy.rules)]
        if not more:
            break
        for problem in more:
            found = _with_rules_of(found, problem)
    return found, last


def _with_rules_of(found: list[Found], later: Problem) -> list[Found]:
    """Adds the rules of a problem that appears after fixes to the problem of its line, otherwise to the first."""
    numbers = [number for number, (_, problem) in enumerate(found) if is_tried(problem)]
    same = [number for number in numbers if _place(found[number][1])[:3] == _place(later)[:3]]
    number = (same or numbers)[0]
    row, problem = found[number]
    rules = merged(problem.remedy.rules, later.remedy.rules)
    problem = dataclasses.replace(problem, remedy=dataclasses.replace(problem.remedy, rules=rules))
    return [*found[:number], (row, problem), *found[number + 1 :]]


def _amplified(
    first: Examination, found: list[Found], last: Examination | None, again: Again
) -> tuple[list[Found], Examination | None]:
    """Adds the operation that makes results or gradients wrong, if their errors exceed rounding."""
    for candidates in _CANDIDATES:
        now = first if last is None or not _is_explained(first, found) else last
        before = errors_of(now.evidence)
        if now.evidence.nonfinite_arguments or not is_off(now.evidence, before):
            break
        best = _best(now.evidence, _rules_of(found), again, candidates)
        if best is None or (now is not first and before.worst < MENDED * best.worst):
            break
        problem = amplification(now.evidence, best.row, best.remedy, before)
        if any(_place(problem) == _place(other) for _, other in found if is_tried(other)):
            found = _with_rules_of(found, problem)
        else:
            row = best.row if now is first else len(first.evidence.rows)
            found = sorted([*found, (row, problem)], key=worst_first)
        last = best.run
    return found, last


def _is_explained(first: Examination, found: list[Found]) -> bool:
    """Returns whether the loss is right or depends on a known problem; one in the backward pass explains no loss."""
    evidence, wrong = first.evidence, {row for row, problem in found if problem.severity == "problem"}
    ends = [row for row in evidence.results if evidence.direction(row) == "forward"]
    is_right = errors_of(evidence).results <= error_limit(evidence)
    return is_right or any(wrong & evidence.before(row) for row in ends) or max(wrong) >= len(evidence.rows)


class _Candidate(NamedTuple):
    """Rules that were tried, the row of their operation, and the remaining error of results or gradients."""

    worst: float
    row: int
    remedy: Remedy
    run: Examination


def _best(evidence: Evidence, rules: AutocastRules, again: Again, count: int) -> _Candidate | None:
    """Returns the first candidate whose remaining error is close to that of the best; the last one has all rules.

    No further ones are tried after one that leaves hardly any error, or that does not run.
    """
    hardly_any, tried = LEFT * error_limit(evidence), list[_Candidate]()
    candidates = list(itertools.islice(amplifiers(evidence), count))
    candidates += [(row, everything_before(evidence, row)) for row, _ in candidates[:1]]
    for row, remedy in candidates:
        run = again(merged(rules, remedy.rules))
        if run is None:
            break
        tried.append(_Candidate(errors_of(run.evidence).worst, row, remedy, run))
        if tried[-1].worst < hardly_any:
            break
    enough = max(_AS_GOOD * min((candidate.worst for candidate in tried), default=0.0), hardly_any)
    return next((candidate for candidate in tried if candidate.worst <= enough), None)


def _with_outcome(
    problem: Problem,
    before: FunctionErrors,
    after: FunctionErrors,
    last: Examination,
    left: set[ProblemPlace],
    shares: str,
) -> Problem:
    """Returns a problem with the outcome of its rules, given the places of problems left and the shares in half."""
    if not is_tried(problem):
        return problem
    is_off_still = after.worst > error_limit(last.evidence)
    if _place(problem) in left or (is_off_still and before.worst < MENDED * after.worst):
        said = "do not mend it, nor does anything else that was found"
    else:
        said = f"mend it{' in part' if is_off_still else ''}"
    return dataclasses.replace(problem, trial=f"tried: these rules {said}; {after.compared_with(before)}{shares}")


def _half_flops(evidence: Evidence) -> float:
    """Returns the fraction of the flops of all passes that are in half precision or 8 bits, from 0 to 1."""
    flops = [flops_of(site.equation) * math.prod(map(repeats_of, site.callers)) for site in evidence.sites]
    floats = [[dtype for dtype in row.dtypes_in if is_float(np.dtype(dtype))] for row in evidence.rows]
    half = sum(n for n, dtypes in zip(flops, floats, strict=True) if dtypes and all(map(is_low, dtypes)))
    return half / max(1, sum(flops))


def is_tried(problem: Problem) -> bool:
    """Returns whether a problem has rules that can be tried."""
    return problem.severity == "problem" and problem.remedy.rules != NO_RULES


def _rules_of(found: list[Found]) -> AutocastRules:
    """Returns the entries of all problems that have rules."""
    return merged(NO_RULES, *(problem.remedy.rules for _, problem in found if is_tried(problem)))


def _place(problem: Problem) -> ProblemPlace:
    return problem.file, problem.line, problem.subject, problem.direction
