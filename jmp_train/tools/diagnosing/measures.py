"""The measures of an equation's result: counts, sums of errors and extreme magnitudes, as one float32 vector.

Vectors of loop iterations, devices and steps are combined: sums are added, and the larger maxima are kept.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

SUMS = (
    "runs",  # how often the equation ran
    "elements",
    "nan",  # elements of the result as it is
    "infinite",
    "shadow_nan",
    "shadow_infinite",
    "overflowed",  # not finite on the shadow's operands, where the shadow is finite
    "flushed",  # zero on the shadow's operands, where the shadow is not
    "subnormal",  # of those that are not zero
    "absorbed",  # of additions in lower precision: where an operand that is not zero changes nothing
    "whole",  # of casts to lower precision: whole numbers
    "whole_rounded",  # of these, not exact in the dtype
    "merged",  # of these, that differ from the element before in the shadow and are the same number in the dtype
    "decided",  # of whole numbers and booleans made of floats: where the shadow has another one
    "local_error",  # |on the shadow's operands - shadow|
    "inherited_error",  # |as it is - shadow|
    "squared_error",  # (|as it is - shadow| / |shadow|)**2, at most 1
    "shadow_magnitude",  # |shadow|
    "shadow_terms",  # of sums: the sum of |terms| in the shadow
)
MAXIMA = (
    "largest",  # magnitude in the shadow
    "smallest",  # that is not zero; negated
    "worst_error",  # local error of one run, relative to what it is an error of
    "first_nan",  # number of the loop iteration; negated
    "first_infinite",
)
COLUMNS = (*SUMS, *MAXIMA)

_LARGE = 2**15  # elements above which each maximum has a loop of its own: a loop that also adds up is not vectorized

_NOTHING = np.array([0.0] * len(SUMS) + [-np.inf] * len(MAXIMA), np.float32)


def is_float(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is floating, of any width."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_whole(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype has integers or booleans."""
    return dtype is not None and (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.bool_))


def is_low(dtype: DTypeLike | None) -> bool:
    """Returns whether a dtype is floating and has fewer bits than float32."""
    return dtype is not None and is_float(dtype) and jnp.finfo(dtype).bits < 32


def least_of(dtype: DTypeLike) -> float:
    """Returns the smallest positive number of a floating dtype or of int8."""
    return 1.0 if is_whole(np.dtype(dtype)) else float(jnp.finfo(dtype).smallest_subnormal)


def widened(dtype: DTypeLike) -> np.dtype:
    """Returns the shadow's dtype: float32 for floats of fewer bits, otherwise the dtype itself."""
    return np.dtype(np.float32) if is_low(dtype) else np.dtype(dtype)


def nothing(rows: int) -> np.ndarray:
    """Returns the measures [rows, columns] of equations that never ran."""
    return np.broadcast_to(_NOTHING, (rows, len(COLUMNS)))


def combine(first: Any, second: jax.Array) -> jax.Array:
    """Returns the measures [..., columns] of two runs together."""
    sums = first[..., : len(SUMS)] + second[..., : len(SUMS)]
    return jnp.concatenate([sums, jnp.maximum(first[..., len(SUMS) :], second[..., len(SUMS) :])], -1)


def combined(stack: Any) -> Any:
    """Returns the measures [..., columns] of all runs, given those of each run stacked along the first axis."""
    concatenate = np.concatenate if isinstance(stack, np.ndarray) else jnp.concatenate
    return concatenate([stack[..., : len(SUMS)].sum(0), stack[..., len(SUMS) :].max(0)], -1)


Elementwise = dict[str, Any]  # column -> array of numbers that are to be added up, or of which the largest counts


def measured(
    actual: jax.Array, shadow: jax.Array | None, local: jax.Array | None, terms: jax.Array | None
) -> Elementwise:
    """Returns the measures of each element of a result.

    Args:
      actual: the actual result.
      shadow: the float32 result of float32 operands; None if it is the same.
      local: the result in the actual dtypes from the shadow's operands; None if nothing is lost.
      terms: for a sum with a shadow, the sum of its terms' magnitudes in the shadow; otherwise None.
    """
    exact = actual if shadow is None else shadow
    as_float32 = lax.convert_element_type(actual, exact.dtype)
    magnitude, finite = lax.abs(exact), lax.is_finite(exact)
    found: Elementwise = {"nan": _is_nan(as_float32), "infinite": _is_infinite(as_float32)}
    found["largest"] = _magnitudes(exact)
    if shadow is not None:
        error = lax.abs(as_float32 - shadow)
        found["shadow_nan"], found["shadow_infinite"] = _is_nan(shadow), _is_infinite(shadow)
        found["inherited_error"] = _where(finite & lax.is_finite(as_float32), error, 0)
        relative = _where(error < magnitude, error / magnitude, 1)
        found["squared_error"] = _where(error > 0, relative * relative, 0)
        found["shadow_magnitude"] = _where(finite, magnitude, 0)
    if terms is not None:
        found["shadow_terms"] = _where(finite, terms, 0)
    if local is not None:
        rounded = lax.convert_element_type(local, exact.dtype)
        kept, positive = lax.is_finite(rounded), lax.gt(magnitude, lax.full_like(magnitude, 0))
        found["local_error"] = _where(finite & kept, lax.abs(rounded - exact), 0)
        found["overflowed"] = finite & ~kept
        found["smallest"] = _magnitudes(exact, negated=True)
        if is_low(actual.dtype):
            zero = lax.eq(rounded, lax.full_like(rounded, 0))
            found["flushed"] = zero & positive
            found["subnormal"] = ~zero & _less(lax.abs(rounded), float(jnp.finfo(actual.dtype).tiny))
    return found


def _magnitudes(exact: jax.Array, *, negated: bool = False) -> jax.Array:
    """Returns the magnitudes of finite numbers, or those of numbers that are not zero, negated."""
    exact = lax.optimization_barrier(exact)  # or they are not fused into the loop that compares them
    magnitude, finite = lax.abs(exact), lax.is_finite(exact)
    if not negated:
        return _where(finite, magnitude, -np.inf)
    return _where(finite & lax.gt(magnitude, lax.full_like(magnitude, 0)), lax.neg(magnitude), -np.inf)


def measured_absorbed(actual: jax.Array, first: jax.Array, second: jax.Array) -> Elementwise:
    """Returns the measures that only additions have.

    Args:
      actual: the sum.
      first: an operand, of the same shape or a scalar.
      second: the other operand.
    """
    first, second = (jnp.broadcast_to(x, actual.shape) for x in (first, second))
    nothing_added = lax.eq(actual, first) & lax.ne(second, lax.full_like(second, 0))
    return {"absorbed": nothing_added | (lax.eq(actual, second) & lax.ne(first, lax.full_like(first, 0)))}


def measured_whole(local: jax.Array, shadow: jax.Array) -> Elementwise:
    """Returns the measures that only casts of whole numbers have.

    Args:
      local: the numbers in the lower precision.
      shadow: the numbers in float32.
    """
    rounded = lax.convert_element_type(local, shadow.dtype)
    whole = lax.is_finite(shadow) & lax.eq(shadow, lax.round(shadow))
    found = {"whole": whole, "whole_rounded": whole & lax.ne(rounded, shadow)}
    if shadow.size > 1:
        merged = _neighbors(lax.eq, rounded) & _neighbors(lax.ne, shadow)
        found["merged"] = lax.reshape(merged, shadow.shape) & whole
    return found


def of_some(counts: jax.Array, values: jax.Array, column: str) -> jax.Array:
    """Returns the measures of a column, of those elements that count."""
    return _where(counts, lax.convert_element_type(values, jnp.float32), 0 if column in SUMS else -np.inf)


def _neighbors(compare: Any, x: jax.Array) -> jax.Array:
    """Compares each element with the previous one, the first with itself."""
    flat = lax.reshape(x, (x.size,))
    before = lax.concatenate([lax.slice(flat, (0,), (1,)), lax.slice(flat, (0,), (x.size - 1,))], 0)
    return compare(flat, before)


def _where(condition: jax.Array, x: jax.Array, other: float) -> jax.Array:
    return lax.select(condition, x, lax.full_like(x, other))


def _less(x: jax.Array, bound: float) -> jax.Array:
    return lax.lt(x, lax.full_like(x, bound))


def _is_nan(x: jax.Array) -> jax.Array:
    return lax.ne(x, x)


def _is_infinite(x: jax.Array) -> jax.Array:
    return lax.eq(lax.abs(x), lax.full_like(x, np.inf))


def totals_of(rows: Sequence[Sequence[Elementwise]], iteration: jax.Array) -> jax.Array:
    """Returns the measures [rows, columns] of equations that ran once.

    Arrays of the same shape are summed in a single pass.

    Args:
      rows: for each equation, the measures of the elements of its results.
      iteration: number of the loop iteration, float32 scalar.
    """
    by_loop: dict[tuple[tuple[int, ...], str], dict[Any, Any]] = {}
    for number, row in enumerate(rows):
        for result, found in enumerate(row):
            for column, values in found.items():
                alone = column if column not in SUMS and np.size(values) > _LARGE else ""
                by_loop.setdefault((jnp.shape(values), alone), {})[number, result, column] = values
    totals: dict[tuple[int, str], Any] = {}
    for found in by_loop.values():
        for (number, _, column), total in _reduced(found).items():
            old = totals.get((number, column))
            add = lax.add if column in SUMS else lax.max
            totals[number, column] = total if old is None else add(old, total)
    matrix = _arranged(totals, len(rows)) + _sizes(rows)
    error, whole, *nonfinite = (
        _column(matrix, name) for name in ("local_error", "shadow_magnitude", "nan", "infinite")
    )
    worst = _where(error > 0, error / whole, 0)
    turn = lax.broadcast(-iteration, worst.shape)
    first = [_where(count > 0, turn, -np.inf) for count in nonfinite]
    return lax.concatenate([matrix[:, : len(COLUMNS) - 3], worst, *first], 1)


def _arranged(totals: dict[tuple[int, str], jax.Array], rows: int) -> jax.Array:
    """Returns totals by row and column as an array [rows, columns]; missing ones are those of no runs."""
    found: list[Any] = []
    for row in range(rows):
        for column, missing in zip(COLUMNS, _NOTHING, strict=True):
            own = totals.get((row, column.removeprefix("shadow_")), missing)  # what has no shadow is its own
            found.append(totals.get((row, column), own))
    return lax.reshape(lax.concatenate([lax.reshape(x, (1,)) for x in found], 0), (rows, len(COLUMNS)))


def _column(matrix: jax.Array, name: str) -> jax.Array:
    place = COLUMNS.index(name)
    return lax.slice_in_dim(matrix, place, place + 1, axis=1)


def _sizes(rows: Sequence[Sequence[Elementwise]]) -> np.ndarray:
    """Returns the number of runs and of elements of each equation, as an array [rows, columns] to add."""
    sizes = np.zeros((len(rows), len(COLUMNS)), np.float32)
    sizes[:, COLUMNS.index("runs")] = 1
    elements = [sum(found["nan"].size for found in row if "nan" in found) for row in rows]
    sizes[:, COLUMNS.index("elements")] = elements
    return sizes


def _reduced(found: dict[Any, Any]) -> dict[Any, Any]:
    """Returns the sums, or the maxima, of arrays of one shape."""
    keys = list(found)
    arrays = tuple(lax.convert_element_type(found[key], jnp.float32) for key in keys)
    is_sum = tuple(column in SUMS for *_, column in keys)
    starts = tuple(np.float32(0 if add else -np.inf) for add in is_sum)

    return dict(zip(keys, lax.reduce(arrays, starts, _reducer(is_sum), tuple(range(arrays[0].ndim))), strict=True))


@functools.cache  # for jax keeps what it is given, with its program
def _reducer(is_sum: tuple[bool, ...]) -> Any:
    """Returns a reducer that adds two numbers or selects the larger one, by kind."""
    combines = [lax.add if add else lax.max for add in is_sum]

    def reducer(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        return tuple(combine(a, b) for combine, a, b in zip(combines, first, second, strict=True))

    return reducer
