"""A value and its shadow, and one operation on such pairs: actual, in float32, and actual on the shadow's operands."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.tools.diagnosing.arithmetic import (
    bound,
    decides,
    decision_of,
    dtype_of,
    float32_results,
    is_in_int8,
    is_measured,
    magnitude_of_terms,
    picks,
    rounded,
    rounding_of,
    rounds_to_whole,
)
from jmp_train.tools.diagnosing.measures import (
    Elementwise,
    is_float,
    is_low,
    is_whole,
    measured,
    measured_absorbed,
    measured_whole,
    of_some,
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
      terms: for a sum with a shadow, the sum of its terms' magnitudes in the shadow; otherwise None.
      addends: for an addition in lower precision, its two operands; otherwise None.
      is_cast: True if whole numbers may be cast to lower precision.
      is_decision: True if the result has whole numbers cast from floats.
      running: for each element of the first result, whether it counts; None if all do. See `Shadowing`.
    """

    results: list[Pair]
    local: list[Any] | None
    terms: Any
    addends: tuple[Any, Any] | None
    is_cast: bool
    is_decision: bool = False
    running: Any = None

    def measures(self) -> list[Elementwise]:
        """Returns the measures of the elements of each result."""
        own = [None] * len(self.results) if self.local is None else self.local
        if not is_float(self.results[0].actual.dtype):
            return [self._of_running(_measured_decision(self.results[0]))]
        found = [measured(x.actual, x.shadow, local, self.terms) for x, local in zip(self.results, own, strict=True)]
        first = self.results[0]
        if self.addends is not None:
            found.append(measured_absorbed(first.actual, *self.addends))
        if self.is_cast and self.local is not None:
            found.append(measured_whole(self.local[0], first.shadow))
        if self.is_decision and first.shadow is not None:
            found.append({"decided": lax.ne(first.actual, first.shadow)})
        return list(map(self._of_running, found))

    def _of_running(self, found: Elementwise) -> Elementwise:
        if self.running is None:
            return found
        counted = {
            column: of_some(self.running, x, column) if x.size == self.running.size else x
            for column, x in found.items()
        }
        return counted | ({"elements": self.running.astype(jnp.float32) - 1} if "nan" in found else {})


def _measured_decision(pair: Pair) -> Elementwise:
    no = jnp.zeros_like(pair.actual, bool)
    return {"nan": no, "decided": no if pair.shadow is None else lax.ne(pair.actual, pair.shadow)}


jax.tree_util.register_dataclass(Ran, ("results", "local", "terms", "addends", "running"), ("is_cast", "is_decision"))


def run_once(
    equation: Any, inputs: list[Pair], *, own: bool = False, running: Any = None
) -> tuple[list[Pair], Ran | None]:
    """Runs an equation, and returns its results and the data to measure, None if it has no row.

    Args:
      equation: the equation.
      inputs: its operands.
      own: True if the shadow of an equation that decides has its own whole numbers.
      running: in a `while` loop under `vmap`, one boolean per element, whether it is measured; None if all are.
    """
    results = run_both(equation, inputs, own=own)
    if not is_measured(equation):
        return results, None
    ran = _run_once(equation, inputs, results)
    first = results[decision_of(equation) or 0] if decides(equation) else (_floats(results) or results)[0]
    shape = first.actual.shape
    if running is None or shape[: running.ndim] != running.shape:
        return results, ran
    each = jnp.ravel(lax.broadcast_in_dim(running, shape, range(running.ndim)))
    return results, dataclasses.replace(ran, running=each)


def _run_once(equation: Any, inputs: list[Pair], results: list[Pair]) -> Ran:
    if decides(equation):
        return _decided(equation, inputs, results)
    floats = _as_floats if is_in_int8(equation) else lambda x: x
    results = [dataclasses.replace(pair, actual=floats(pair.actual)) for pair in results]
    if all(pair.shadow is None for pair in results):
        return _ran(equation, inputs, results, None, None)
    exact = all(pair.shadow is None for pair in inputs)
    wide = [_shadow_of(pair) for pair in inputs]
    if not _loses(equation):
        return _ran(equation, inputs, results, None, magnitude_of_terms(equation, wide) if len(results) == 1 else None)
    actual = [pair.actual for pair in results]
    local = actual if exact else list(map(floats, bound(equation, [_rounded_shadow(pair) for pair in inputs])))
    local = lax.optimization_barrier(local)  # or a compiler may leave the rounding out
    return _ran(equation, inputs, results, local, magnitude_of_terms(equation, wide))


def _as_floats(x: Any) -> Any:
    """Returns numbers in int8, or their sums, as floats: bfloat16 holds all of int8."""
    return lax.convert_element_type(x, jnp.bfloat16 if dtype_of(x) == np.int8 else jnp.float32)


def _floats(results: list[Pair]) -> list[Pair]:
    return [pair for pair in results if is_float(dtype_of(pair.actual))]


def _decided(equation: Any, inputs: list[Pair], results: list[Pair]) -> Ran:
    """Returns the whole numbers of an equation and those that it would compute from the shadow, of casts as floats."""
    number = decision_of(equation) or 0
    is_same = all(pair.shadow is None for pair in inputs)
    exact = None if is_same else float32_results(equation, [_shadow_of(pair) for pair in inputs])
    pair = Pair(results[number].actual, None if exact is None else exact[number])
    if not picks(equation):
        pair = jax.tree.map(lambda x: lax.convert_element_type(x, jnp.float32), pair)
    return Ran([jax.tree.map(jnp.ravel, pair)], None, None, None, False, True)


def run_both(equation: Any, inputs: list[Pair], *, own: bool = False) -> list[Pair]:
    """Runs an equation in its own dtypes and in float32, and returns its results; see `run_once`."""
    actual = bound(equation, [pair.actual for pair in inputs])
    may_lose = is_measured(equation) and _loses(equation) and not decides(equation)
    exact = all(pair.shadow is None for pair in inputs) and not may_lose
    shadows = None if exact else float32_results(equation, [_shadow_of(pair) for pair in inputs])
    if shadows is None:
        return [Pair(x) for x in actual]
    own = own or not any(is_float(dtype_of(pair.actual)) for pair in inputs)
    if rounds_to_whole(equation) and not own:  # as an index has them that is computed from the same numbers
        finite = zip(actual, shadows, strict=True)
        shadows = [jnp.where(jnp.isfinite(x), x.astype(y.dtype), y) for x, y in finite]
    kept = (is_float(dtype_of(y)) or (own and is_whole(dtype_of(x))) for x, y in zip(actual, shadows, strict=True))
    return [Pair(x, y if keep else None) for x, y, keep in zip(actual, shadows, kept, strict=True)]


def _has_shadow(x: Any, *, own: bool) -> bool:
    return is_float(dtype_of(x)) or dtype_of(x) == np.int8 or (own and is_whole(dtype_of(x)))


def _loses(equation: Any) -> bool:
    is_half = any(is_low(dtype_of(atom)) for atom in (*equation.invars, *equation.outvars))
    return is_half or is_in_int8(equation) or rounding_of(equation) is not None


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


def with_shadow(pair: Pair, *, own: bool = False) -> Pair:
    """Returns a pair of arrays with an explicit shadow if it is a float, for loop carries.

    Args:
      pair: the pair.
      own: True if whole numbers have shadows too.
    """
    if not _has_shadow(pair.actual, own=own):
        return pair
    shadow = _shadow_of(pair)
    is_int8 = dtype_of(pair.actual) == np.int8  # which is the same in all loops: of a product in few bits, or not
    return Pair(pair.actual, lax.convert_element_type(shadow, jnp.float32) if is_int8 else shadow)


def _shadow_of(pair: Pair) -> Any:
    if pair.shadow is not None:
        return pair.shadow
    dtype = dtype_of(pair.actual)
    return lax.convert_element_type(pair.actual, widened(dtype)) if is_low(dtype) else pair.actual


def _rounded_shadow(pair: Pair) -> Any:
    if pair.shadow is None:
        return pair.actual
    return rounded(pair.shadow, dtype_of(pair.actual))
