"""From the rows of a diagnosis to its problems: what is harmful, where it began, and what mends it.

Each finder yields (row, problem). A problem is where an error begins: what inherits it is not named again.
"""

import linecache
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import PRODUCTS
from jmp_train.policies.diagnosing.arithmetic import SUMS
from jmp_train.policies.diagnosing.equations import user_line
from jmp_train.policies.diagnosing.evidence import Evidence
from jmp_train.policies.diagnosing.measures import is_low
from jmp_train.policies.diagnosing.problems import Kind, Problem, Severity
from jmp_train.policies.diagnosing.programs import dtype_of
from jmp_train.policies.diagnosing.remedies import (
    Remedy,
    in_float32,
    larger_epsilon,
    larger_scale,
    smaller_fill,
    smaller_scale,
)

_LOST_DIGITS = 0.1  # relative error of one operation of the forward pass
_LOST_TERMS = 0.02  # share of a sum's terms
_FLUSHED = 0.5  # relative error of one operation some of whose elements become zero
_REACHED = 0.05  # relative error of a result, or of the backward pass, that a problem has to make
_REACHED_GRADIENT = 0.3  # and of a parameter's gradient
_UNCHANGED = 0.5  # share of a state leaf's elements that should change
_NUMBER = re.compile(r"(?<![\w.])(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_BECOMES_NOTHING = (("add", 0.0), ("max", 0.0), ("mul", 1.0))  # of a constant: what it does to a value

Found = Iterator[tuple[int, Problem]]


def problems_of(evidence: Evidence) -> tuple[Problem, ...]:
    """Returns the problems, one a line of code: those that harm before notes, and of these what happens first.

    Args:
      evidence: of a diagnosis.
    """
    found: dict[Any, tuple[int, Problem]] = {}
    for find in _FINDERS:
        for row, problem in find(evidence):
            key = problem.file, problem.line, problem.path if not problem.line else ""
            if key not in found or (problem.severity, found[key][1].severity) == ("problem", "note"):
                found[key] = row, problem
    order = sorted(found.values(), key=lambda item: (item[1].severity != "problem", item[0]))
    return tuple(problem for _, problem in order)


def _problem(
    evidence: Evidence, row: int, kind: Kind, text: str, remedy: Remedy, *, harmful: bool = True, line: str = ""
) -> tuple[int, Problem]:
    site = evidence.sites[row]
    file, _, number = (line or site.line).rpartition(":")
    severity: Severity = "problem" if harmful else "note"
    where = site.direction, site.path, file, int(number or 0), site.equation.primitive.name
    return row, Problem(severity, kind, *where, text, remedy)


def _arguments(evidence: Evidence) -> Found:
    for number, path in evidence.nonfinite_arguments.items():
        rows = [i for i, site in enumerate(evidence.sites) if -1 - number in site.sources]
        remedy = Remedy("mathematics", f"mend {path!r} before the function is called")
        for row in rows[:1]:
            yield _problem(evidence, row, "NaN made", f"the argument {path!r} is not finite", remedy, harmful=False)


def _constants(evidence: Evidence) -> Found:
    """Finds numbers in the code that are other ones in the dtype: an epsilon that is 0, a decay that is 1."""
    for i, site in enumerate(evidence.sites):
        for literal in site.equation.invars:
            if not isinstance(literal, jex.Literal) or not is_low(dtype_of(literal)) or np.shape(literal.val):
                continue
            value, dtype = float(literal.val), str(dtype_of(literal))
            if (site.equation.primitive.name, value) not in _BECOMES_NOTHING:
                continue
            number = _number_in_code(site.line, value, dtype)
            if number and value == 0:
                text = f"the constant {number} is 0 in {dtype}"
                yield _problem(evidence, i, "underflow", text, larger_epsilon(evidence, i))
            elif number:
                text = f"the constant {number} is {value:g} in {dtype}: what is multiplied by it never changes"
                yield _problem(evidence, i, "stagnation", text, in_float32(evidence, i))


def _number_in_code(line: str, value: float, dtype: str) -> str | None:
    """Returns the number in a line of code that is that value in a dtype, but not in float32; None if there is none."""
    file, _, number = line.rpartition(":")
    for text in _NUMBER.findall(linecache.getline(file, int(number or 0))):
        with np.errstate(over="ignore"):
            if float(text) != value and float(np.asarray(float(text), jnp.dtype(dtype))) == value:
                return text
    return None


def _masks(evidence: Evidence) -> Found:
    """Finds NaN that infinite constants make, as a mask that leaves nothing over does."""
    for i in evidence.first_to_be("nan"):
        site, sources = evidence.sites[i], evidence.sources(i)
        if not site.infinite or (sources and not evidence.column("infinite")[sources].any()):
            continue
        mask = site.infinite[0]
        dtype = str(dtype_of(mask[-1].outvars[0]))
        text = f"a mask is infinite in {dtype}, and {evidence.rows[i].nan:.2%} of {_named(evidence, i)} are NaN"
        yield _problem(evidence, i, "invalid mask", text, smaller_fill(dtype), line=user_line(mask))


def _whole_numbers(evidence: Evidence) -> Found:
    whole, merged = evidence.column("whole"), evidence.column("merged")
    for i, row in enumerate(evidence.rows):
        if not row.whole_rounded or row.overflowed or row.direction == "backward":
            continue
        if whole[i] < evidence.column("elements")[i]:
            continue
        text = f"{row.whole_rounded:.1%} of whole numbers up to {row.largest:.9g} are rounded in {row.dtype}"
        if merged[i]:
            text += f", {row.merged:.1%} become their neighbor"
        remedy = in_float32(evidence, i, "integers or float32 until they are scaled")
        harmful = bool(merged[i]) and evidence.reaches(i, 0.0)
        yield _problem(evidence, i, "integer precision lost", text, remedy, harmful=harmful)


def _overflows(evidence: Evidence) -> Found:
    for i, row in enumerate(evidence.rows):
        if not row.overflowed:
            continue
        largest = float(jnp.finfo(row.dtype).max)
        share = f"{row.overflowed:.2%} of {_named(evidence, i)}"
        if row.largest <= largest:
            text = f"{share} are infinite or NaN, of operands that are 0 in {row.dtype}"
        else:
            text = f"{share} overflow: up to {row.largest:.3g}, and {row.dtype} ends at {largest:.5g}"
        unscaled = row.largest / evidence.loss_scale
        if row.direction == "backward" and evidence.loss_scale > 1 and unscaled < largest < row.largest:
            text += f"; without the loss scale of {evidence.loss_scale:g} they reach {unscaled:.3g}"
            remedy = smaller_scale(evidence)
            yield _problem(evidence, i, "overflow", text, remedy, harmful=not evidence.dynamic)
            continue
        yield _problem(evidence, i, "overflow", text, in_float32(evidence, i), harmful=evidence.spreads(i))


def _nans(evidence: Evidence) -> Found:
    """Finds NaN that no infinity made which was found already."""
    overflowed, infinite = evidence.column("overflowed"), evidence.column("infinite")
    for i in evidence.first_to_be("nan"):
        sources = evidence.sources(i)
        text = f"{evidence.rows[i].nan:.2%} of {_named(evidence, i)} are NaN"
        if evidence.column("shadow_nan")[i]:
            remedy = Remedy("mathematics", "mend the mathematics: the operands are where it is not defined")
            yield _problem(evidence, i, "NaN made", f"{text}, in float32 too", remedy)
        elif not overflowed[i] and not overflowed[sources].any() and not infinite[sources].any():
            yield _problem(evidence, i, "NaN made", f"{text}, and not in float32", in_float32(evidence, i))


def _underflows(evidence: Evidence) -> Found:
    for i, row in enumerate(evidence.rows):
        if not row.flushed or row.overflowed or row.local_error < _FLUSHED or row.primitive in ("add", "sub"):
            continue
        least = float(jnp.finfo(row.dtype).smallest_subnormal)
        text = (
            f"{row.flushed:.2%} of {_named(evidence, i)} become 0: {row.smallest:.2g} to {row.largest:.2g}, "
            f"and {row.dtype} begins at {least:.2g}"
        )
        if row.direction != "backward":
            harmful = evidence.reaches(i, _REACHED)
            yield _problem(evidence, i, "underflow", text, in_float32(evidence, i), harmful=harmful)
            continue
        remedy = larger_scale(evidence) or in_float32(evidence, i)
        harmful = evidence.reaches(i, _REACHED_GRADIENT, "update")
        yield _problem(evidence, i, "underflow", text, remedy, harmful=harmful)


def _stagnating_sums(evidence: Evidence) -> Found:
    for i, row in enumerate(evidence.rows):
        if row.lost_terms < _LOST_TERMS or row.overflowed or row.primitive in ("add", "sub", "add_any"):
            continue
        text = f"{row.lost_terms:.1%} of what {_named(evidence, i)} adds up is lost"
        harmful = evidence.reaches(i, _LOST_TERMS / 2)
        yield _problem(evidence, i, "stagnation", text, in_float32(evidence, i), harmful=harmful)


def _cancellations(evidence: Evidence) -> Found:
    not_looked_at = (SUMS - {"add", "sub"}) | PRODUCTS  # of small results and large terms, as gradients have them
    for i, row in enumerate(evidence.rows):
        if row.overflowed or row.direction != "forward" or row.primitive in not_looked_at:
            continue
        if row.local_error < _LOST_DIGITS:
            continue
        text = f"{_named(evidence, i)} is off by {row.local_error:.1%} if its operands are rounded, by that alone"
        harmful = evidence.reaches(i, _REACHED)
        yield _problem(evidence, i, "cancellation", text, in_float32(evidence, i), harmful=harmful)


def _state(evidence: Evidence) -> Found:
    for leaf in evidence.state:
        if not leaf.rows or leaf.unchanged <= _UNCHANGED * leaf.changing:
            continue
        share = leaf.unchanged / leaf.changing
        text = f"{share:.1%} of {leaf.path!r} stay the same {leaf.dtype} though they should change"
        advice = "float32 for it, with_master_weights or with_stochastic_rounding"
        yield _problem(evidence, max(leaf.rows), "stagnation", text, Remedy("state", advice))


_FINDERS: tuple[Callable[[Evidence], Found], ...] = (
    _arguments,
    _constants,
    _masks,
    _whole_numbers,
    _overflows,
    _nans,
    _underflows,
    _stagnating_sums,
    _cancellations,
    _state,
)


def _named(evidence: Evidence, row: int) -> str:
    found = evidence.rows[row]
    return f"{found.primitive} {found.dtype}[{','.join(map(str, found.shape))}]"
