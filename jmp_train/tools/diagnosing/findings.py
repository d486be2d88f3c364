"""Finds the problems of a diagnosis from its rows: harm, origin and remedy.

Each finder yields (row, problem). A problem is the origin of an error; the report omits operations that inherit it.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import PRODUCTS
from jmp_train.tools.diagnosing.amplifying import named_row
from jmp_train.tools.diagnosing.arithmetic import SUMS, TO_FEW_BITS, dtype_of
from jmp_train.tools.diagnosing.equations import (
    Site,
    epsilon_in_code,
    is_infinite,
    is_zero_by_default,
    number_in_code,
    user_line,
)
from jmp_train.tools.diagnosing.evidence import Evidence
from jmp_train.tools.diagnosing.measures import is_float, is_low, least_of
from jmp_train.tools.diagnosing.operation_numerics import is_loss, is_reduction
from jmp_train.tools.diagnosing.problems import Found, problem_at, worst_first
from jmp_train.tools.diagnosing.remedies import (
    LINEAR,
    Remedy,
    in_float32,
    larger_epsilon,
    larger_scale,
    operands_in_float32,
    smaller_fill,
    smaller_scale,
)
from jmp_train.tools.diagnosing.results import (
    accumulations,
    collapsed_arguments,
    flushed_operand,
    grown_infinities,
    has_lost_operand,
    is_undefined_at_zero,
    nonfinite_arguments,
    products_in_8_bits,
    stagnating_state,
    stagnating_sums,
    wrong_results,
)

_LOST_DIGITS = 0.1  # relative error of one operation of the forward pass
_AMPLIFIED = 10  # relative error of a result, in those of its operands
_FLUSHED = 0.5  # relative error of one operation some of whose elements become zero
_REACHED = 0.05  # relative error of a result, or of the backward pass, that a problem has to make
_REACHED_GRADIENT = 0.3  # and of a parameter's gradient
_BECOMES_NOTHING = (("add", 0.0), ("max", 0.0), ("mul", 1.0))  # of a constant: what it does to a value


def problems_of(evidence: Evidence) -> list[Found]:
    """Returns rows and problems, one per line of code: harmful ones before notes, and each in the order of execution.

    Args:
      evidence: the evidence of a diagnosis.
    """
    found: dict[Any, Found] = {}
    for find in (*_FINDERS, *(functools.partial(late, found) for late in (grown_infinities, wrong_results))):
        for row, problem in find(evidence):
            key = (
                problem.file,
                problem.line,
                "" if problem.line else problem.path,
                problem.subject,
                "" if row < 0 or evidence.sites[row].under_autocast else evidence.argument(row),
            )
            if key not in found or worst_first((row, problem)) < worst_first(found[key]):
                found[key] = row, problem
    return sorted(found.values(), key=worst_first)


def _constants(evidence: Evidence) -> Iterator[Found]:
    """Finds numbers in the code that change in the dtype: an epsilon that becomes 0, a decay that becomes 1."""
    for i, site in enumerate(evidence.sites):
        for literal in site.equation.invars:
            if not isinstance(literal, jex.Literal) or not is_low(dtype_of(literal)) or np.shape(literal.val):
                continue
            value, dtype = float(literal.val), str(dtype_of(literal))
            if site.equation.primitive.name == "div" and math.isinf(value) and literal is site.equation.invars[1]:
                number = number_in_code(site.line, value, dtype)
                text = f"the constant {number} is infinite in {dtype}: what is divided by it is 0"
                if number:
                    yield problem_at(evidence, i, "overflow", text, in_float32(evidence, i))
                continue
            if (site.equation.primitive.name, value) not in _BECOMES_NOTHING:
                continue
            if value == 0 and is_zero_by_default(site.line) and _is_under_root(evidence, i):
                continue
            number = epsilon_in_code(site.line, dtype) if value == 0 else number_in_code(site.line, value, dtype)
            if number and value == 0:
                text = f"the constant {number} is 0 in {dtype}"
                yield problem_at(evidence, i, "underflow", text, larger_epsilon(evidence, i))
            elif number:
                text = f"the constant {number} is {value:g} in {dtype}: what is multiplied by it never changes"
                yield problem_at(evidence, i, "stagnation", text, in_float32(evidence, i))


def _is_under_root(evidence: Evidence, row: int) -> bool:
    return any(evidence.rows[reader].primitive == "sqrt" for reader in evidence.readers(row))


def _is_constant(site: Site) -> bool:
    """Returns whether an equation converts a number in the code to lower precision."""
    is_cast = site.equation.primitive.name == "convert_element_type"
    return is_cast and not site.sources and not site.equation.outvars[0].aval.shape


def _masks(evidence: Evidence) -> Iterator[Found]:
    """Finds NaN from infinite constants, such as a mask of all elements."""
    for i in evidence.first_to_be("nan"):
        site = evidence.sites[i]
        nan = f"{evidence.rows[i].nan:.2%} of {evidence.named(i)} are NaN"
        if _is_multiplied_by_infinity(evidence, i):
            dtype = str(dtype_of(site.equation.outvars[0]))
            number = number_in_code(site.line, math.inf, dtype) or "that multiplies a mask"
            text = f"the constant {number} is infinite in {dtype}, and times 0 it is NaN: {nan}"
            yield problem_at(evidence, i, "invalid mask", text, smaller_fill(dtype))
        elif _is_of_mask(evidence, i):
            fills = _of_floats(site.fills)
            mask = min(fills or _of_floats(site.infinite), key=_largest_of_result)
            dtype = str(dtype_of(mask[-1].outvars[0]))
            text = f"a mask is infinite in {dtype}, and {nan}"
            remedy = smaller_fill(dtype, is_added=not fills)
            yield problem_at(evidence, i, "invalid mask", text, remedy, line=user_line(mask))


def _is_multiplied_by_infinity(evidence: Evidence, row: int) -> bool:
    equation = evidence.sites[row].equation
    is_constant = equation.primitive.name == "mul" and any(map(is_infinite, equation.invars))
    return is_constant and not evidence.nonfinite_arguments


def _of_floats(masks: Sequence[Any]) -> list[Any]:
    """Returns the sites of infinite constants that enter floats, not only comparisons."""
    return [mask for mask in masks if is_float(dtype_of(mask[-1].outvars[0]))]


def _largest_of_result(mask: Sequence[Any]) -> float:
    return float(jnp.finfo(dtype_of(mask[-1].outvars[0])).max)


def _is_of_mask(evidence: Evidence, row: int) -> bool:
    """Returns whether a row's NaN come from an infinite constant, also in float32."""
    site, sources = evidence.sites[row], evidence.sources(row)
    if evidence.nonfinite_arguments or not _of_floats(site.infinite) or not evidence.column("shadow_nan")[row]:
        return False  # an overflow made the infinity
    return bool(_of_floats(site.fills)) or not sources or bool(evidence.column("shadow_infinite")[sources].any())


def _whole_numbers(evidence: Evidence) -> Iterator[Found]:
    whole, merged = evidence.column("whole"), evidence.column("merged")
    for i, row in enumerate(evidence.rows):
        if not row.whole_rounded or row.overflowed or row.direction == "backward":
            continue
        if whole[i] < evidence.column("elements")[i] or _is_constant(evidence.sites[i]):
            continue
        text = f"{row.whole_rounded:.1%} of whole numbers up to {row.largest:.9g} are rounded in {row.dtype}"
        if merged[i]:
            text += f", {row.merged:.1%} become their neighbor"
        remedy = in_float32(evidence, i, "integers or float32 until they are scaled")
        harmful = bool(merged[i]) and evidence.reaches(i, 0.0)
        yield problem_at(evidence, i, "integer precision lost", text, remedy, harmful=harmful)


def _overflows(evidence: Evidence) -> Iterator[Found]:
    for i, row in enumerate(evidence.rows):
        if not row.overflowed:
            continue
        largest = float(jnp.finfo(row.dtype).max)
        share = f"{row.overflowed:.2%} of {evidence.named(i)}"
        if row.largest <= largest:
            zeros, large = f"operands that are 0 in {row.dtype}", f"operands, or sums of them, beyond {largest:.5g}"
            text = f"{share} are infinite or NaN, of {zeros if is_undefined_at_zero(evidence, i) else large}"
        else:
            text = f"{share} overflow: up to {row.largest:.6g}, and {row.dtype} ends at {largest:.5g}"
        if _is_constant(evidence.sites[i]):
            harmful = evidence.spreads(i)
            yield problem_at(evidence, i, "invalid mask", text, smaller_fill(row.dtype), harmful=harmful)
            continue
        unscaled = row.largest / evidence.loss_scale
        is_scaled = row.direction == "backward" or is_reduction(evidence.sites[i])
        if is_scaled and evidence.loss_scale > 1 and unscaled < largest < row.largest:
            text += f"; without the loss scale of {evidence.loss_scale:g} they reach {unscaled:.3g}"
            remedy = smaller_scale(evidence, "return the loss in float32, or " if is_loss(evidence.sites[i]) else "")
            yield problem_at(evidence, i, "overflow", text, remedy, harmful=not evidence.dynamic)
            continue
        yield problem_at(evidence, i, "overflow", text, in_float32(evidence, i), harmful=evidence.spreads(i))


def _divides_by_zero(evidence: Evidence, row: int) -> bool:
    """Returns whether a row makes infinities from zeros without an epsilon that became 0."""
    epsilons = [i for i in evidence.sources(row) if _is_constant(evidence.sites[i]) and evidence.rows[i].flushed]
    found = evidence.rows[row]
    is_of_zeros = is_undefined_at_zero(evidence, row) and found.largest <= float(jnp.finfo(found.dtype).max)
    return is_of_zeros and found.overflowed > 0 and not epsilons and not evidence.sites[row].zeros


def _nans(evidence: Evidence) -> Iterator[Found]:
    """Finds NaN that do not come from infinities found before."""
    overflowed, infinite = evidence.column("overflowed"), evidence.column("infinite")
    for i in evidence.first_to_be("nan"):
        if _is_multiplied_by_infinity(evidence, i) or _is_of_mask(evidence, i) or _is_unused_constant(evidence, i):
            continue
        sources = evidence.sources(i)
        text = f"{evidence.rows[i].nan:.2%} of {evidence.named(i)} are NaN"
        if zeros := evidence.sites[i].zeros:
            line, dtype = user_line(zeros[0]), str(dtype_of(zeros[0][-1].outvars[0]))
            text = f"the constant {epsilon_in_code(line, dtype)} is 0 in {dtype}, and {text}"
            yield problem_at(evidence, i, "underflow", text, larger_epsilon(evidence, i), line=line)
        elif evidence.column("shadow_nan")[i]:
            remedy = Remedy("mathematics", "mend the mathematics: the operands are where it is not defined")
            row, problem = problem_at(evidence, i, "NaN made", text, remedy)
            yield row, dataclasses.replace(problem, in_float32="too")
        elif not overflowed[i] and not overflowed[sources].any() and not infinite[sources].any():
            begin = named_row(evidence, i)
            remedy = operands_in_float32(evidence, begin) if begin != i else in_float32(evidence, i)
            yield problem_at(evidence, begin, "NaN made", f"{text}, and not in float32", remedy)


def _is_unused_constant(evidence: Evidence, row: int) -> bool:
    """Returns whether a row is an unused number in the code, as the NaN in `jnp.where(count > 0, mean, nan)`."""
    return _is_constant(evidence.sites[row]) and not any(evidence.rows[i].nan for i in evidence.readers(row))


def _infinities(evidence: Evidence) -> Iterator[Found]:
    """Finds infinities from operands that became 0 before, such as a reciprocal of an underflow."""
    for i in evidence.first_to_be("infinite"):
        row = evidence.rows[i]
        if row.overflowed or evidence.column("shadow_infinite")[i] or not is_undefined_at_zero(evidence, i):
            continue
        text = f"{row.infinite:.2%} of {evidence.named(i)} are infinite, and not in float32: an operand has become 0"
        begin = named_row(evidence, i)
        remedy = operands_in_float32(evidence, begin)
        kind = "cancellation" if evidence.rows[begin].primitive in ("add", "sub") else "underflow"
        yield problem_at(evidence, begin, kind, text, remedy, harmful=evidence.spreads(i))


def _underflows(evidence: Evidence) -> Iterator[Found]:
    for i, row in enumerate(evidence.rows):
        if not row.flushed or row.overflowed or row.primitive in ("add", "sub"):
            continue
        if row.primitive == TO_FEW_BITS.name and (row.direction == "forward" or has_lost_operand(evidence, i)):
            continue  # see `products_in_8_bits`
        least = least_of(row.dtype)
        if row.smallest > least:  # the operands are rounded to where the result is 0
            continue
        is_divisor = any(_divides_by_zero(evidence, reader) for reader in evidence.readers(i))
        if row.worst_error < _FLUSHED and not is_divisor:
            continue
        text = (
            f"{row.flushed:.2%} of {evidence.named(i)} become 0: {row.smallest:.2g} to {row.largest:.2g}, "
            f"and {row.dtype} begins at {least:.2g}"
        )
        if row.direction != "backward":
            remedy = (larger_epsilon if _is_constant(evidence.sites[i]) else in_float32)(evidence, i)
            harmful = is_divisor or evidence.reaches(i, _REACHED)
            yield problem_at(evidence, i, "underflow", text, remedy, harmful=harmful)
            continue
        remedy = larger_scale(evidence) or in_float32(evidence, i)
        harmful = evidence.reaches(i, _REACHED_GRADIENT)
        yield problem_at(evidence, i, "underflow", text, remedy, harmful=harmful)


def _cancellations(evidence: Evidence) -> Iterator[Found]:
    not_looked_at = (
        (SUMS - {"add", "sub"}) | PRODUCTS | {TO_FEW_BITS.name}
    )  # of small results and large terms, as gradients have them
    for i, row in enumerate(evidence.rows):
        if row.overflowed or row.direction != "forward" or row.primitive in not_looked_at:
            continue
        if "float4_e2m1fn" in row.dtypes_in:  # of a product in 4 bits, whose operands are off by a tenth anyway
            continue
        if is_low(row.dtype) and row.largest > float(jnp.finfo(row.dtype).max):
            continue  # of operands that are infinite
        if row.worst_error >= _LOST_DIGITS:
            text = f"{evidence.named(i)} is off by {row.worst_error:.1%} if its operands are rounded, by that alone"
        elif _amplifies(evidence, i):
            text = f"{evidence.named(i)} is off by {row.inherited_error:.1%}, more than {_AMPLIFIED} times its operands"
        else:
            continue
        harmful = evidence.reaches(i, _REACHED)
        yield problem_at(evidence, i, "cancellation", text, operands_in_float32(evidence, i), harmful=harmful)


def _amplifies(evidence: Evidence, row: int) -> bool:
    """Returns whether a function amplifies small errors, as an exponential of a difference of large numbers does."""
    found = evidence.rows[row]
    errors = [evidence.rows[i].inherited_error for i in evidence.sources(row)]
    is_candidate = found.primitive not in LINEAR and is_low(found.dtype)
    if not (is_candidate and errors and found.inherited_error > max(_LOST_DIGITS, _AMPLIFIED * max(errors))):
        return False
    # Next to an outlier, the loss of all other elements of a product in 8 bits is a small error.
    return all(flushed_operand(evidence, i) is None for i in evidence.before(row))


_FINDERS: tuple[Callable[[Evidence], Iterator[Found]], ...] = (
    nonfinite_arguments,
    _constants,
    _masks,
    _whole_numbers,
    _overflows,
    _infinities,
    _nans,
    _underflows,
    products_in_8_bits,
    stagnating_sums,
    accumulations,
    _cancellations,
    collapsed_arguments,
    stagnating_state,
)
