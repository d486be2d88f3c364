"""Problems that arguments, sums, the state and results show: lost terms, lost updates, results far from float32."""

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax.numpy as jnp

from jmp_train.policies.autocasting import FEW_BITS_PRODUCTS, LAYOUT, largest_of
from jmp_train.tools.diagnosing.amplifying import addition_before, gradients_error, terms_error
from jmp_train.tools.diagnosing.arithmetic import TO_FEW_BITS
from jmp_train.tools.diagnosing.evidence import Evidence, StateLeaf
from jmp_train.tools.diagnosing.measures import is_float, is_low, least_of
from jmp_train.tools.diagnosing.problems import Found, problem_at
from jmp_train.tools.diagnosing.remedies import Remedy, full_state, in_float32, in_half, operands_in_float32

_WRONG = 0.5  # relative error of a result
_LOST_DIGITS = 0.1  # relative error of one operation that has lost its result's digits
_ROUNDING = 1e-3  # relative error that operands have at least

KnownProblems = Mapping[Any, Found]
_LOST_TERMS = 0.02  # share of a sum's terms
_ABSORBED = 0.1  # share of the additions of a loop
_UNCHANGED = 0.5  # share of a state leaf's elements that should change
_FLUSHED = 0.1  # share of an operand's elements; in 4 bits it is so without an outlier
_LOST = 0.95  # relative error of an operand
_IN_4_BITS = 0.3  # relative error of a product in 4 bits, twice that without an outlier
_TO_THE_PRODUCT = LAYOUT | {"convert_element_type", "mul"}
_BEFORE_ALL = -1  # the number of a row that comes before all operations
_REACHED = 0.05  # relative error of a result, or of the backward pass, that a problem has to make


def grown_infinities(known: KnownProblems, evidence: Evidence) -> Iterator[Found]:
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
        text = f"{row.infinite:.2%} of {evidence.named(i)} are infinite, and not in float32: operands that are off"
        remedy = operands_in_float32(evidence, i)
        yield problem_at(evidence, i, "overflow", text, remedy, harmful=evidence.spreads(i))


def is_undefined_at_zero(evidence: Evidence, row: int) -> bool:
    """Returns whether an operation returns infinities or NaN for zeros."""
    equation = evidence.sites[row].equation
    name = equation.primitive.name
    return name in ("div", "log", "pow", "rsqrt") or (name == "integer_pow" and equation.params["y"] < 0)


def wrong_results(known: KnownProblems, evidence: Evidence) -> Iterator[Found]:
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
            f"{evidence.named(row)} is off by {_times(evidence.rows[row].inherited_error)}, its operands by "
            f"{_operands_error(evidence, row):.1%}"
        )
        remedy = operands_in_float32(evidence, row)
        yield problem_at(evidence, addition_before(evidence, row), "cancellation", text, remedy)


def _is_explained(known: KnownProblems, evidence: Evidence, row: int) -> bool:
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


def stagnating_sums(evidence: Evidence) -> Iterator[Found]:
    """Finds sums that lose a fraction of their terms."""
    for i, row in enumerate(evidence.rows):
        if row.lost_terms < _LOST_TERMS or row.overflowed or row.primitive in ("add", "sub", "add_any"):
            continue
        text = f"{row.lost_terms:.1%} of what {evidence.named(i)} adds up is lost"
        harmful = evidence.reaches(i, _LOST_TERMS / 2)
        yield problem_at(evidence, i, "stagnation", text, in_float32(evidence, i), harmful=harmful)


def accumulations(evidence: Evidence) -> Iterator[Found]:
    """Finds sums over a loop's iterations that most terms no longer change."""
    for i, row in enumerate(evidence.rows):
        if row.absorbed < _ABSORBED or row.primitive not in ("add", "sub") or not evidence.feeds_itself(i):
            continue
        text = f"{row.absorbed:.1%} of what {evidence.named(i)} adds in {row.runs} iterations changes nothing"
        harmful = evidence.reaches(i, _LOST_TERMS / 2)
        yield problem_at(evidence, i, "stagnation", text, in_float32(evidence, i), harmful=harmful)


def stagnating_state(evidence: Evidence) -> Iterator[Found]:
    """Finds leaves of the state that should change, but whose elements mostly stay the same."""
    for leaves in _by_line(evidence):
        share = sum(leaf.unchanged for leaf in leaves) / sum(leaf.changing for leaf in leaves)
        more = f" and of {len(leaves) - 1} more lea{'f' if len(leaves) == 2 else 'ves'}" if len(leaves) > 1 else ""
        first = leaves[0]
        text = f"{share:.1%} of {first.path!r}{more} stay the same {first.dtype} though they should change"
        row = max(first.rows)
        is_number = all(evidence.rows[max(leaf.rows)].shape == () for leaf in leaves)
        yield problem_at(evidence, row, "stagnation", text, full_state(first.dtype, is_number=is_number))


def _by_line(evidence: Evidence) -> Iterable[list[StateLeaf]]:
    """Returns the leaves of the state that stay the same, grouped by the line that updates them."""
    together: dict[str, list[StateLeaf]] = {}
    for leaf in evidence.state:
        if leaf.rows and leaf.unchanged > _UNCHANGED * leaf.changing:
            together.setdefault(evidence.sites[max(leaf.rows)].line, []).append(leaf)
    return together.values()


def nonfinite_arguments(evidence: Evidence) -> Iterator[Found]:
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


def products_in_8_bits(evidence: Evidence) -> Iterator[Found]:
    """Finds products in 8 bits whose operand has outliers that make many of its other elements 0."""
    for row in range(len(evidence.rows)):
        if (cast := flushed_operand(evidence, row)) is None or evidence.direction(row) != "forward":
            continue
        found = evidence.rows[cast]
        text = (
            f"{found.flushed:.1%} of an operand of {evidence.named(row)} become 0 in {found.dtype}: the largest number "
            f"is {found.largest / found.smallest:.2g} times the smallest, and those of {found.dtype} "
            f"{largest_of(jnp.dtype(found.dtype)) / least_of(found.dtype):.3g} times"
        )
        harmful = evidence.reaches(row, _REACHED)
        yield problem_at(evidence, row, "underflow", text, in_half(evidence, row), harmful=harmful)


def flushed_operand(evidence: Evidence, row: int) -> int | None:
    """Returns the row of an operand's cast to few bits in which many elements become 0, for a product; otherwise None.

    Args:
      evidence: the evidence of a diagnosis.
      row: row of the product.
    """
    if evidence.rows[row].primitive not in FEW_BITS_PRODUCTS:
        return None
    read = evidence.sources(row)
    for i in read:  # grows during the loop: with scales of blocks, the numbers are multiplied by them first
        if evidence.rows[i].primitive in _TO_THE_PRODUCT:
            read += [source for source in evidence.sources(i) if source not in read]
    casts = [i for i in read if evidence.rows[i].primitive == TO_FEW_BITS.name and not has_lost_operand(evidence, i)]
    before = sum(max(0.0, evidence.rows[i].inherited_error - evidence.rows[i].local_error) for i in casts)
    is_off = evidence.rows[row].inherited_error > before + _IN_4_BITS
    casts = [i for i in casts if is_off or "float4" not in evidence.rows[i].dtype]
    worst = max(casts, key=lambda i: evidence.rows[i].flushed, default=None)
    return worst if worst is not None and evidence.rows[worst].flushed > _FLUSHED else None


def has_lost_operand(evidence: Evidence, row: int) -> bool:
    """Returns whether hardly anything was left of an operand, whose scale of zeros says nothing."""
    return _operands_error(evidence, row) > _LOST


def collapsed_arguments(evidence: Evidence) -> Iterator[Found]:
    """Finds arguments with different values that a cast makes equal."""
    for row in range(len(evidence.sites)):
        path = evidence.argument(row)
        if text := evidence.collapsed.get(path):
            harmful = evidence.reaches(row, _REACHED)
            yield problem_at(evidence, row, "values collapse", text, in_float32(evidence, row), harmful=harmful)
