"""Errors of results and gradients, and the operations that amplify small errors."""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import PRODUCTS
from jmp_train.tools.diagnosing.arithmetic import SUMS, TO_FEW_BITS, rounding_of
from jmp_train.tools.diagnosing.evidence import Evidence, reached
from jmp_train.tools.diagnosing.measures import is_float, is_low
from jmp_train.tools.diagnosing.problems import Problem, problem_at
from jmp_train.tools.diagnosing.remedies import LINEAR, Remedy, operands_in_float32, product_of_cast

_UNITS = 10  # of rounding, that results and gradients may be off by
GRADIENTS = 0.025  # that gradients may be off by: those of a trained model cancel between examples
_GAIN = 3  # times that an operation's error is as large as its operands'
# Units of products by the types of their operands: each is off by about two, and gradients by some times that.
_IN_FEW_BITS = {"float8_e4m3fn": 2.0**-6, "float4_e2m1fn": 2.0**-4}
_ROUNDED = 0.2  # of the half type's unit, that numbers are off by which were only rounded
_ADDITIONS = ("add", "sub", "add_any")
_LINES = 2  # whose operations are looked at


@dataclasses.dataclass(frozen=True)
class FunctionErrors:
    """Errors of a function relative to float32; infinite if it is not finite and float32 is.

    Attributes:
      results: error of the loss or, without a backward pass, the largest error of a result.
      gradients: error of all gradients together; None without gradients.
    """

    results: float
    gradients: float | None

    @property
    def worst(self) -> float:
        """The larger error."""
        return max(self.results, self.gradients or 0.0)

    def compared_with(self, before: "FunctionErrors | None" = None) -> str:
        """Returns a sentence with these errors and, if there are any, earlier ones."""
        said = [f"{'results are' if self.gradients is None else 'the loss is'} {off_text(self.results)}"]
        said += [] if self.gradients is None else [f"gradients {off_text(self.gradients)}"]
        earlier = () if before is None else (before.results, before.gradients)
        for place, error in enumerate(error for error in earlier[: len(said)] if error is not None):
            said[place] += f" (before: {text_of(error)})"
        return ", ".join(said)

    def __str__(self) -> str:
        return self.compared_with()


def off_text(error: float) -> str:
    """Returns by how much something is off."""
    return f"off by {text_of(error)}" if math.isfinite(error) else text_of(error)


def errors_of(evidence: Evidence) -> FunctionErrors:
    """Returns the errors of a function.

    Args:
      evidence: its evidence.
    """
    gradients = [row for row in evidence.ends if evidence.sites[row].direction == "backward"]
    results = [
        row
        for row in evidence.results
        if _is_result(evidence, row) and (not gradients or evidence.rows[row].shape == ())
    ]
    off = max((_error(evidence, row) for row in results), default=0.0)
    return FunctionErrors(off, gradients_error(evidence) if gradients else None)


def _is_result(evidence: Evidence, row: int) -> bool:
    """Returns whether a row is a floating result of the forward pass."""
    return evidence.direction(row) == "forward" and is_float(evidence.rows[row].dtype)


def _error(evidence: Evidence, row: int) -> float:
    if _is_lost(evidence, [row]):
        return math.inf
    error = evidence.rows[row].inherited_error
    return min(error, terms_error(evidence, row)) if evidence.rows[row].shape == () else error


def terms_error(evidence: Evidence, end: int) -> float:
    """Returns the largest error of the terms of a scalar, which may be small compared with them; otherwise its own.

    Args:
      evidence: the evidence of a diagnosis.
      end: row of the scalar.
    """
    rows = reached([end], lambda row: evidence.sources(row) if evidence.rows[row].shape == () else [])
    terms = (evidence.rows[i].inherited_error for i in rows if evidence.rows[i].shape != ())
    return max(terms, default=evidence.rows[end].inherited_error)


def gradients_error(evidence: Evidence) -> float:
    """Returns the error of all gradients together; 0 without gradients.

    Args:
      evidence: the evidence of a diagnosis.
    """
    ends = [i for i in evidence.ends if evidence.sites[i].direction == "backward"]
    error, whole = (float(evidence.column(name)[ends].sum()) for name in ("inherited_error", "shadow_magnitude"))
    if _is_lost(evidence, ends):
        return math.inf
    return error / whole if whole else 0.0


def _is_lost(evidence: Evidence, rows: list[int]) -> bool:
    nan, infinite, meant = (evidence.column(name)[rows] for name in ("nan", "infinite", "shadow_infinite"))
    return bool((nan > 0).any() or (infinite > meant).any())


def error_limit(evidence: Evidence) -> float:
    """Returns the tolerated error of results and gradients: some rounding units of the half type.

    Args:
      evidence: the evidence of a diagnosis.
    """
    return _UNITS * _unit(evidence)


def is_off(evidence: Evidence, errors: FunctionErrors) -> bool:
    """Returns whether results or gradients are finite, with errors above those of the half type's rounding.

    Args:
      evidence: the evidence of a diagnosis.
      errors: errors of its function.
    """
    limit, gradients = error_limit(evidence), errors.gradients or 0.0
    return (errors.results > limit or gradients > max(limit, GRADIENTS)) and errors.worst < math.inf


def _unit(evidence: Evidence) -> float:
    few_bits = {row.dtype for row in evidence.rows if row.primitive == TO_FEW_BITS.name} & _IN_FEW_BITS.keys()
    dtypes = {row.dtype for row in evidence.rows} & {"float16", "bfloat16"}
    on_device = (rounding.eps for site in evidence.sites if (rounding := rounding_of(site.equation)) is not None)
    units = [float(jnp.finfo(dtype).eps) for dtype in dtypes] + [_IN_FEW_BITS[dtype] for dtype in few_bits]
    return max((*units, *on_device), default=math.inf)


def amplifiers(evidence: Evidence) -> Iterator[tuple[int, Remedy]]:
    """Yields the operations that amplify their operands' errors most, with rules to try.

    Errors of all elements come first, in the forward pass before the backward pass, then those of some elements.

    Args:
      evidence: the evidence of a diagnosis.
    """
    reaching = sorted(set[int]().union(*map(evidence.before, evidence.ends)))
    whole = [row.inherited_error for row in evidence.rows]
    each = errors_of_elements(evidence)
    seen = list[Remedy]()
    for errors, direction in ((whole, "forward"), (each, "forward"), (whole, "backward")):
        rows = [row for row in reaching if evidence.direction(row) == direction]
        rows = [row for row in rows if errors is whole or _has_own_elements(evidence, row)]
        ways = ((False, False), (True, False), (True, True))  # ever more of what an operation is computed from
        for (shared, products), row in itertools.product(ways, _first_of(evidence, rows, errors)):
            remedy = operands_in_float32(evidence, row, shared=shared, products=products)
            if remedy not in seen:
                yield row, remedy
            seen.append(remedy)


def _first_of(evidence: Evidence, rows: Sequence[int], errors: Sequence[float]) -> list[int]:
    """Returns the rows, from few lines, whose errors are largest relative to those of their operands."""
    unit = _unit(evidence)
    gains = {
        # What a loop carries into its next iteration has the errors that were made in it.
        row: errors[row] / max([_ROUNDED * unit, *(errors[i] for i in evidence.sources(row) if i < row)])
        for row in rows
        if _GAIN * unit < errors[row] < math.inf and is_float(evidence.rows[row].dtype)
    }
    large = sorted((row for row, gain in gains.items() if gain > _GAIN), key=lambda row: gains[row])
    lines = {evidence.sites[row].line or row: row for row in large}  # of each the largest
    return sorted(lines.values(), key=lambda row: -gains[row])[:_LINES]


def amplification(evidence: Evidence, row: int, remedy: Remedy, errors: FunctionErrors) -> Problem:
    """Returns the problem of an operation that makes results or gradients wrong.

    Args:
      evidence: the evidence of a diagnosis.
      row: row of the operation.
      remedy: the remedy.
      errors: errors of the function.
    """
    row = named_row(evidence, row)
    row = product_of_cast(evidence, row) if evidence.rows[row].primitive == TO_FEW_BITS.name else row
    text = f"{evidence.named(row)} makes more of the rounding of its operands than results can bear: {errors}"
    return problem_at(evidence, row, "cancellation", text, remedy)[1]


def named_row(evidence: Evidence, row: int) -> int:
    """Returns the operation to report for one that amplifies its operands' errors: the one where their errors begin.

    It follows errors back, then those of a few small elements, which the error of all hides. If they begin in a float32
    function, it is the last operation in lower precision before it, which rounded its operands, for example before the
    difference from the largest element in a softmax.

    Args:
      evidence: the evidence of a diagnosis.
      row: row of the operation.
    """
    every = set(range(len(evidence.rows)))
    row = _begin(evidence, row, [found.inherited_error for found in evidence.rows], every)
    each, own = errors_of_elements(evidence), {i for i in every if _has_own_elements(evidence, i)}
    begin = _begin(evidence, row, each, own)
    if all(i in own or each[i] < each[begin] / _GAIN for i in evidence.sources(begin)):
        row = begin  # and no product's small elements are what errs
    found = evidence.rows[row]
    is_of_number = any(isinstance(x, jex.Literal) for x in evidence.sites[row].equation.invars)
    is_difference = found.primitive in _ADDITIONS and (is_of_number or len(evidence.sources(row)) > 1)
    rounded = product_of_cast(evidence, _last_rounded(evidence, row))
    has_line = not evidence.argument(rounded)  # as a cast of an argument has none
    return rounded if has_line and not is_low(found.dtype) and not is_difference else row


def _begin(evidence: Evidence, row: int, errors: Sequence[float], looked_at: set[int]) -> int:
    """Returns the row, among the examined ones, in which the errors of a row begin."""
    seen = {row}
    while sources := [i for i in evidence.sources(row) if i in looked_at - seen and math.isfinite(errors[i])]:
        worst = max(sources, key=lambda i: errors[i])
        if errors[worst] < max(errors[row] / _GAIN, _GAIN * _unit(evidence)):
            break
        seen.add(worst)
        row = worst
    return row


def _has_own_elements(evidence: Evidence, row: int) -> bool:
    """Returns whether small elements of a row are more than residues of large terms in products and long sums."""
    found = evidence.rows[row]
    return evidence.direction(row) == "forward" and found.primitive not in (SUMS - {"add", "sub"}) | PRODUCTS


def _last_rounded(evidence: Evidence, row: int) -> int:
    """Returns the last operation in lower precision before one, of several the least exact; otherwise itself."""

    def is_rounded(i: int) -> bool:
        return i != row and (is_low(evidence.rows[i].dtype) or rounding_of(evidence.sites[i].equation) is not None)

    rounded = filter(is_rounded, sorted(reached([row], lambda i: [] if is_rounded(i) else evidence.sources(i))))
    errors = evidence.column("inherited_error") / np.maximum(evidence.column("elements"), 1)
    return max(rounded, key=lambda i: errors[i], default=row)


def errors_of_elements(evidence: Evidence) -> list[float]:
    """Returns, per row, the root mean square of the relative errors of its elements; each error counts at most 1."""
    return np.sqrt(evidence.column("squared_error") / np.maximum(evidence.column("elements"), 1)).tolist()


def addition_before(evidence: Evidence, row: int) -> int:
    """Returns the addition that produces an operation's operand, perhaps scaled; otherwise itself.

    Args:
      evidence: the evidence of a diagnosis.
      row: row of the operation.
    """
    last = row
    while evidence.rows[last].primitive not in _ADDITIONS:
        sources = [i for i in evidence.sources(last) if evidence.direction(i) == "forward"]
        if len(sources) != 1 or evidence.rows[sources[0]].primitive not in LINEAR:
            return row
        (last,) = sources
    return last


def text_of(error: float) -> str:
    """Returns the text of an error."""
    if math.isinf(error):
        return "not finite"
    return f"{100 * error:.2g}%" if error < 1 else f"{error:.3g} times itself"
