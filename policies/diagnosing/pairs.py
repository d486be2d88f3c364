"""A value beside its shadow, and one operation on such: as it is, in float32, and as it is on the shadow's operands."""

import dataclasses
from typing import Any

import jax
from jax import lax

from jmp_train.policies.diagnosing.arithmetic import bound, in_float32, magnitude_of_terms, rounded
from jmp_train.policies.diagnosing.measures import (
    Elementwise,
    is_float,
    is_low,
    measured,
    measured_absorbed,
    measured_whole,
    widened,
)
from jmp_train.policies.diagnosing.programs import dtype_of, is_measured


@dataclasses.dataclass(frozen=True)
class Pair:
    """A value of the program.

    Attributes:
      actual: as the program computes it.
      shadow: in float32; None where it is the same number, or no float.
    """

    actual: Any
    shadow: Any = None


jax.tree_util.register_dataclass(Pair, ("actual", "shadow"), ())


def run_once(equation: Any, inputs: list[Pair]) -> tuple[list[Pair], list[Elementwise]]:
    """Runs an equation: its results, and what is measured of their elements, which is nothing if it has no row."""
    results = run_both(equation, inputs)
    if not is_measured(equation):
        return results, []
    if not _loses(equation) or all(pair.shadow is None for pair in results):
        return results, _measures(equation, inputs, results, None, None)
    exact = all(pair.shadow is None for pair in inputs)
    wide = [_shadow_of(pair) for pair in inputs]
    actual = [pair.actual for pair in results]
    local = actual if exact else bound(equation, [_rounded_shadow(pair) for pair in inputs])
    local = lax.optimization_barrier(local)  # or a compiler may leave the rounding out
    return results, _measures(equation, inputs, results, local, magnitude_of_terms(equation, wide))


def run_both(equation: Any, inputs: list[Pair]) -> list[Pair]:
    """Runs an equation as it is and in float32, and returns its results."""
    actual = bound(equation, [pair.actual for pair in inputs])
    exact = all(pair.shadow is None for pair in inputs) and not (is_measured(equation) and _loses(equation))
    shadows = None if exact else in_float32(equation, [_shadow_of(pair) for pair in inputs])
    if shadows is None:
        return [Pair(x) for x in actual]
    return [Pair(x, y if is_float(dtype_of(x)) else None) for x, y in zip(actual, shadows, strict=True)]


def _loses(equation: Any) -> bool:
    return any(is_low(dtype_of(atom)) for atom in (*equation.invars, *equation.outvars))


def _measures(
    equation: Any, inputs: list[Pair], results: list[Pair], local: list[Any] | None, terms: Any
) -> list[Elementwise]:
    """Returns what is measured of the elements of an equation's results that are floats."""
    floats = [i for i, pair in enumerate(results) if is_float(dtype_of(pair.actual))]
    own = [None] * len(results) if local is None else local
    found = [measured(results[i].actual, results[i].shadow, own[i], terms) for i in floats]
    first, name = results[floats[0]], equation.primitive.name
    if not is_low(dtype_of(first.actual)) or first.shadow is None:
        return found
    if name in ("add", "sub", "add_any") and len(inputs) == 2:
        found.append(measured_absorbed(first.actual, *(pair.actual for pair in inputs)))
    if name in ("convert_element_type", "iota") and local is not None:
        found.append(measured_whole(local[floats[0]], first.shadow))
    return found


def with_shadow(pair: Pair) -> Pair:
    """Returns a pair of arrays whose shadow is there if it is a float, as loops carry it."""
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
