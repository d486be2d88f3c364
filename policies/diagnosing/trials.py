"""Tries the proposals of a diagnosis: runs the function by the rules, completes them, and records the outcome."""

import collections
import dataclasses
import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp

from jmp_train.policies.autocasting import TORCH_CUDA, AutocastRules, autocast, trying
from jmp_train.policies.diagnosing.amplifying import (
    Errors,
    amplification,
    amplifiers,
    error_limit,
    errors_of,
    is_off,
    named_row,
    text_of,
)
from jmp_train.policies.diagnosing.descriptions import is_by_policy
from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.examining import Examination, examine
from jmp_train.policies.diagnosing.problems import Problem, problem_at, worst_first
from jmp_train.policies.diagnosing.remedies import (
    Remedy,
    everything_before,
    extended,
    in_float32,
    lacks,
    merged_rules,
    operands_in_float32,
)

_ROUNDS = 4  # in which rules are completed
_CANDIDATES = (8, 3)  # sets of rules that are tried where no operation stands out, and once the best is followed
_MENDED = 1.5  # times that an error becomes smaller, at least
_AS_GOOD = 2  # times the error that the best rules leave
_LEFT = 0.25  # of the error that is tolerated, with which the search ends
_EVERYTHING = TORCH_CUDA.replace(paths={"": "float32"})
_SHADOW_TOO = ", in float32 too"

Found = list[tuple[int, Problem]]
Again = Callable[[AutocastRules], Examination | None]
_LINES = 2  # that are tried


def examine_by_rules(
    first: Examination, fn: Callable[..., Any], args: tuple[Any, ...], rules: AutocastRules
) -> Examination | None:
    """Returns the examination of a function that runs by rules; None if no rules reach it.

    Its autocast regions and half-precision policies take the rules; a function without any runs under autocast. A
    function with effects runs only once.

    Args:
      first: the examination of the unchanged function.
      fn: the function.
      args: its arguments.
      rules: autocast rules.
    """
    half = _half_type(first.evidence)
    if half is None or first.has_effects:
        return None
    if any(site.under_autocast or is_by_policy(site) for site in first.evidence.sites):

        def by_rules(*args: Any) -> Any:
            with trying(rules):
                return fn(*args)

    elif any(first.evidence.direction(row) == "update" for row in range(len(first.evidence.rows))):
        return None  # a step that casts for itself
    else:
        by_rules = autocast(fn, half, rules=rules)
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


def with_trials(first: Examination, again: Again) -> Found:
    """Returns the problems of a function with complete rules and their outcome.

    Args:
      first: the examination of the unchanged function.
      again: returns the examination of the function that runs by rules, or None.
    """
    found = sorted([*_checked_in_float32(first, again), *decisions(first, again)], key=worst_first)
    found, last = _completed(first, found, again)
    found, last = _amplified(first, found, last, again)
    if last is None:
        return found
    before = errors_of(first.evidence)
    return [(row, _with_outcome(problem, before, last)) for row, problem in found]


def _checked_in_float32(first: Examination, again: Again) -> Found:
    """Returns the problems, with a note for those that a float32 run has too."""
    too = [problem for _, problem in first.found if problem.evidence.endswith(_SHADOW_TOO)]
    if not too or not any(row.dtype in ("float16", "bfloat16") for row in first.evidence.rows):
        return first.found
    exact = again(_EVERYTHING)
    lines = set() if exact is None else {_place(p) for _, p in exact.found if p.evidence.endswith(_SHADOW_TOO)}

    def checked(row: int, problem: Problem) -> Problem:
        if problem not in too or _place(problem) in lines:
            return problem
        text = problem.evidence.removesuffix(_SHADOW_TOO)
        if exact is None:
            return dataclasses.replace(problem, evidence=f"{text}, and so are those of the same operands in float32")
        remedy = in_float32(first.evidence, row)
        return dataclasses.replace(problem, evidence=f"{text}, and not where all of it is float32", remedy=remedy)

    return [(row, checked(row, problem)) for row, problem in first.found]


def _completed(first: Examination, found: Found, again: Again) -> tuple[Found, Examination | None]:
    """Returns the problems with all rules that their function needs, and its examination under these."""
    last = None
    for _ in range(_ROUNDS):
        remedies = [problem.remedy for _, problem in found if is_tried(problem)]
        last = again(merged_rules(remedies)) if remedies else None
        if last is None:
            break
        known = merged_rules(remedies)
        more = [problem for _, problem in last.found if is_tried(problem) and lacks(known, problem.remedy.rules)]
        if not more:
            break
        for problem in more:
            found = _with_rules_of(found, problem)
    return found, last


def _with_rules_of(found: Found, later: Problem) -> Found:
    """Adds the rules of a problem that appears after fixes to the problem of its line, otherwise to the first."""
    numbers = [number for number, (_, problem) in enumerate(found) if is_tried(problem)]
    same = [number for number in numbers if _place(found[number][1])[:3] == _place(later)[:3]]
    number = (same or numbers)[0]
    row, problem = found[number]
    problem = dataclasses.replace(problem, remedy=extended(problem.remedy, later.remedy.rules))
    return [*found[:number], (row, problem), *found[number + 1 :]]


def _amplified(
    first: Examination, found: Found, last: Examination | None, again: Again
) -> tuple[Found, Examination | None]:
    """Adds the operation that makes results or gradients wrong, if their errors exceed rounding."""
    for candidates in _CANDIDATES:
        now = first if last is None or not _is_explained(first, found) else last
        before = errors_of(now.evidence)
        if now.evidence.nonfinite_arguments or not is_off(now.evidence, before):
            break
        remedies = [problem.remedy for _, problem in found if is_tried(problem)]
        tried = list(_tried(now.evidence, remedies, again, candidates))
        best = _chosen(tried, error_limit(now.evidence)) if tried else None
        if best is None or (now is not first and before.worst < _MENDED * best.worst):
            break
        problem = amplification(now.evidence, best.row, best.remedy, before)
        if any(_place(problem) == _place(other) for _, other in found if is_tried(other)):
            found = _with_rules_of(found, problem)
        else:
            row = best.row if now is first else len(first.evidence.rows)
            found = sorted([*found, (row, problem)], key=worst_first)
        last = best.run
    return found, last


def _is_explained(first: Examination, found: Found) -> bool:
    """Returns whether the loss is right or depends on a known problem; one in the backward pass explains no loss."""
    evidence, wrong = first.evidence, {row for row, problem in found if problem.severity == "problem"}
    ends = [row for row in evidence.results if evidence.direction(row) == "forward"]
    is_right = errors_of(evidence).results <= error_limit(evidence)
    return is_right or any(wrong & evidence.before(row) for row in ends) or max(wrong) >= len(evidence.rows)


@dataclasses.dataclass(frozen=True)
class _Candidate:
    """Rules that were tried.

    Attributes:
      worst: the remaining error of results or gradients.
      row: row of their operation.
      remedy: the rules.
      run: the run of the function by them.
    """

    worst: float
    row: int
    remedy: Remedy
    run: Examination


def _chosen(tried: list[_Candidate], limit: float) -> _Candidate:
    """Returns the first candidate whose remaining error is close to that of the best."""
    enough = max(_AS_GOOD * min(candidate.worst for candidate in tried), _LEFT * limit)
    return next(candidate for candidate in tried if candidate.worst <= enough)


def _tried(evidence: Evidence, remedies: list[Remedy], again: Again, count: int) -> Iterator[_Candidate]:
    """Yields candidates until one leaves hardly any error; the last one has all rules."""
    candidates = list(itertools.islice(amplifiers(evidence), count))
    if candidates:
        row = candidates[0][0]
        candidates.append((row, everything_before(evidence, row)))
    for row, remedy in candidates:
        run = again(merged_rules([*remedies, remedy]))
        if run is None:
            return
        worst = errors_of(run.evidence).worst
        yield _Candidate(worst, row, remedy, run)
        if worst < _LEFT * error_limit(evidence):
            return


def _with_outcome(problem: Problem, before: Errors, last: Examination) -> Problem:
    """Returns a problem with the outcome of its rules."""
    if not is_tried(problem):
        return problem
    is_left = any(_place(problem) == _place(other) for _, other in last.found if other.severity == "problem")
    after = errors_of(last.evidence)
    is_off_still = after.worst > error_limit(last.evidence)
    if is_left or (is_off_still and before.worst < _MENDED * after.worst):
        said = "do not mend it, nor does anything else that was found"
    else:
        said = f"mend it{' in part' if is_off_still else ''}"
    return dataclasses.replace(problem, trial=f"tried: these rules {said}; {after.compared_with(before)}")


def is_tried(problem: Problem) -> bool:
    """Returns whether a problem has rules that can be tried."""
    return problem.severity == "problem" and problem.remedy.rules != AutocastRules()


def _place(problem: Problem) -> tuple[str, int, str, str]:
    return problem.file, problem.line, problem.subject, problem.direction


def decisions(
    first: Examination, again: Callable[[AutocastRules], Examination | None]
) -> Iterator[tuple[int, Problem]]:
    """Finds whole numbers that differ in half precision and change results: a run by rules has others.

    Args:
      first: the examination of the unchanged function.
      again: returns the examination of the function that runs by rules, or None.
    """
    evidence = first.evidence
    rows = [i for i, row in enumerate(evidence.rows) if row.decided and row.direction == "forward"]
    begins = {named_row(evidence, i): i for i in reversed(rows)}
    for begin, row in sorted(begins.items())[:_LINES]:
        remedy = operands_in_float32(evidence, row, shared=True)
        run = again(merged_rules([remedy]))
        moved = 0.0 if run is None else _apart(first, run)
        if moved > error_limit(evidence):
            text = (
                f"{evidence.rows[row].decided:.2%} of {evidence.named(row)} are other whole numbers than those of "
                f"float32, with which results or gradients differ by {text_of(moved)}"
            )
            yield problem_at(evidence, begin, "integer precision lost", text, remedy)


def _apart(first: Examination, second: Examination) -> float:
    """Returns the largest difference between the results of two runs, in float32."""
    found = [0.0]
    for x, y in zip(first.outputs, second.outputs, strict=False):
        if x.shape != y.shape or not bool(jnp.isfinite(y).all()):
            continue
        if not bool(jnp.isfinite(x).all()):
            return math.inf
        size, difference = (float(jnp.linalg.norm(jnp.ravel(z))) for z in (y, x - y))
        found.append(difference / size if size else 0.0)
    return max(found)
