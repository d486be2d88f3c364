"""A value and its shadow, and one operation on such pairs: actual, in float32, and actual on the shadow's operands."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies.diagnosing.arithmetic import (
    bound,
    decides,
    dtype_of,
    in_float32,
    is_measured,
    magnitude_of_terms,
    rounded,
    rounding_of,
)
from jmp_train.policies.diagnosing.measures import (
    Elementwise,
    is_float,
    is_low,
    measured,
    measured_absorbed,
    measured_whole,
    widened,
)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of the program.

    Attributes:
      actual: the value that the program computes.
      shadow: the float32 value; None if it is the same number or no float.
    """

    actual: Any
    shadow: Any = None


jax.tree_util.register_dataclass(Pair, ("actual", "shadow"), ())


@dataclasses.dataclass(frozen=True)
class Ran:
    """The data for the measures of an equation that ran; arrays are flat.

    Attributes:
      results: the floating results.
      local: the same results from the shadow's operands; None if nothing is lost.
      terms: for a sum in lower precision, the sum of its terms' magnitudes in the shadow; otherwise None.
      addends: for an addition in lower precision, its two operands; otherwise None.
      is_cast: True if whole numbers may be cast to lower precision.
      is_decision: True if the result has whole numbers cast from floats.
    """

    results: list[Pair]
    local: list[Any] | None
    terms: Any
    addends: tuple[Any, Any] | None
    is_cast: bool
    is_decision: bool = False

    def measures(self) -> list[Elementwise]:
        """Returns the measures of the elements of each result."""
        own = [None] * len(self.results) if self.local is None else self.local
        found = [measured(x.actual, x.shadow, local, self.terms) for x, local in zip(self.results, own, strict=True)]
        first = self.results[0]
        if self.addends is not None:
            found.append(measured_absorbed(first.actual, *self.addends))
        if self.is_cast and self.local is not None:
            found.append(measured_whole(self.local[0], first.shadow))
        if self.is_decision and first.shadow is not None:
            found.append({"decided": lax.ne(first.actual, first.shadow)})
        return found


jax.tree_util.register_dataclass(Ran, ("results", "local", "terms", "addends"), ("is_cast", "is_decision"))


def run_once(equation: Any, inputs: list[Pair]) -> tuple[list[Pair], Ran | None]:
    """Runs an equation, and returns its results and the data to measure, None if it has no row."""
    results = run_both(equation, inputs)
    if not is_measured(equation):
        return results, None
    if decides(equation):
        return results, _decided(equation, inputs[0], results[0])
    if not _loses(equation) or all(pair.shadow is None for pair in results):
        return results, _ran(equation, inputs, results, None, None)
    exact = all(pair.shadow is None for pair in inputs)
    wide = [_shadow_of(pair) for pair in inputs]
    actual = [pair.actual for pair in results]
    local = actual if exact else bound(equation, [_rounded_shadow(pair) for pair in inputs])
    local = lax.optimization_barrier(local)  # or a compiler may leave the rounding out
    return results, _ran(equation, inputs, results, local, magnitude_of_terms(equation, wide))


def _decided(equation: Any, operand: Pair, result: Pair) -> Ran:
    """Returns the whole numbers of an equation and those that it would compute from the shadow, as floats."""
    exact = result.actual if operand.shadow is None else bound(equation, [operand.shadow])[0]
    actual, exact = (jnp.ravel(lax.convert_element_type(x, jnp.float32)) for x in (result.actual, exact))
    return Ran([Pair(actual, None if operand.shadow is None else exact)], None, None, None, False, True)


def run_both(equation: Any, inputs: list[Pair]) -> list[Pair]:
    """Runs an equation in its own dtypes and in float32, and returns its results."""
    actual = bound(equation, [pair.actual for pair in inputs])
    exact = all(pair.shadow is None for pair in inputs) and not (is_measured(equation) and _loses(equation))
    shadows = None if exact else in_float32(equation, [_shadow_of(pair) for pair in inputs])
    if shadows is None:
        return [Pair(x) for x in actual]
    return [Pair(x, y if is_float(dtype_of(x)) else None) for x, y in zip(actual, shadows, strict=True)]


def _loses(equation: Any) -> bool:
    is_half = any(is_low(dtype_of(atom)) for atom in (*equation.invars, *equation.outvars))
    return is_half or rounding_of(equation) is not None


def _ran(equation: Any, inputs: list[Pair], results: list[Pair], local: list[Any] | None, terms: Any) -> Ran:
    floats = [i for i, pair in enumerate(results) if is_float(dtype_of(pair.actual))]
    first, name = results[floats[0]], equation.primitive.name
    is_low_sum = is_low(dtype_of(first.actual)) and first.shadow is not None
    addends = None
    if is_low_sum and name in ("add", "sub", "add_any") and len(inputs) == 2:
        one, other = (jnp.broadcast_to(pair.actual, first.actual.shape) for pair in inputs)
        addends = one, other
    ran = Ran(
        results=[results[i] for i in floats],
        local=None if local is None else [local[i] for i in floats],
        terms=terms,
        addends=addends,
        is_cast=is_low_sum and name in ("convert_element_type", "iota"),
    )
    return jax.tree.map(jnp.ravel, ran)


def with_shadow(pair: Pair) -> Pair:
    """Returns a pair of arrays with an explicit shadow if it is a float, for loop carries."""
    if pair.shadow is not None or not is_float(dtype_of(pair.actual)):
        return pair
    return Pair(pair.actual, _shadow_of(pair))


def _shadow_of(pair: Pair) -> Any:
    if pair.shadow is not None:
        return pair.shadow
    dtype = dtype_of(pair.actual)
    return lax.convert_element_type(pair.actual, widened(dtype)) if is_low(dtype) else pair.actual


def _rounded_shadow(pair: Pair) -> Any:
    if pair.shadow is None:
        return pair.actual
    return rounded(pair.shadow, dtype_of(pair.actual))
