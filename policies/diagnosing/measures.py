"""What is measured of an equation's result: counts, sums of errors and extreme magnitudes, as one float32 vector.

Vectors of loop iterations, of devices and of steps are combined: sums are added, of maxima the larger one is kept.
"""

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
    "local_error",  # |on the shadow's operands - shadow|
    "inherited_error",  # |as it is - shadow|
    "shadow_magnitude",  # |shadow|
    "shadow_terms",  # of sums: the sum of |terms| in the shadow
)
MAXIMA = (
    "largest",  # magnitude in the shadow
    "smallest",  # that is not zero; negated
    "first_nan",  # number of the loop iteration; negated
    "first_infinite",
)
COLUMNS = (*SUMS, *MAXIMA)

_NOTHING = np.array([0.0] * len(SUMS) + [-np.inf] * len(MAXIMA), np.float32)


def is_float(dtype: DTypeLike | None) -> bool:
    """Whether a dtype is a floating one, of whatever width."""
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_low(dtype: DTypeLike | None) -> bool:
    """Whether a dtype is floating and has fewer bits than float32."""
    return dtype is not None and is_float(dtype) and jnp.finfo(dtype).bits < 32


def widened(dtype: DTypeLike) -> np.dtype:
    """Returns the shadow's dtype of a dtype: float32 for floats of fewer bits, else itself."""
    return np.dtype(np.float32) if is_low(dtype) else np.dtype(dtype)


def nothing(rows: int) -> jax.Array:
    """Returns the measures [rows, columns] of equations that never ran."""
    return jnp.broadcast_to(_NOTHING, (rows, len(COLUMNS)))


def combine(first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the measures [..., columns] of two runs together."""
    sums = first[..., : len(SUMS)] + second[..., : len(SUMS)]
    return jnp.concatenate([sums, jnp.maximum(first[..., len(SUMS) :], second[..., len(SUMS) :])], -1)


def combined(stack: jax.Array) -> jax.Array:
    """Returns the measures [..., columns] of runs together that are stacked along the first axis."""
    return jnp.concatenate([stack[..., : len(SUMS)].sum(0), stack[..., len(SUMS) :].max(0)], -1)


def measured(
    actual: jax.Array, shadow: jax.Array | None, local: jax.Array | None, terms: jax.Array | None, iteration: jax.Array
) -> jax.Array:
    """Returns the measures [columns] of a result.

    Args:
      actual: the result as it is.
      shadow: in float32, of float32 operands; None where it is the same.
      local: in the dtypes as they are, of the shadow's operands; None where nothing is lost.
      terms: of a sum in lower precision, that of its terms' magnitudes in the shadow; else None.
      iteration: number of the loop iteration, float32 scalar.
    """
    exact = actual if shadow is None else shadow
    as_float32 = actual.astype(exact.dtype)
    magnitude, finite = jnp.abs(exact), jnp.isfinite(exact)
    found: dict[str, Any] = {
        "nan": jnp.isnan(as_float32),
        "infinite": jnp.isinf(as_float32),
        "largest": jnp.where(finite, magnitude, -np.inf),
    }
    if shadow is not None:
        found["shadow_nan"] = jnp.isnan(shadow)
        found["shadow_infinite"] = jnp.isinf(shadow)
        found["inherited_error"] = jnp.where(finite & jnp.isfinite(as_float32), jnp.abs(as_float32 - shadow), 0)
        found["shadow_magnitude"] = jnp.where(finite, magnitude, 0)
    if terms is not None:
        found["shadow_terms"] = jnp.where(finite, terms, 0)
    if local is not None:
        rounded = local.astype(exact.dtype)
        found["local_error"] = jnp.where(finite & jnp.isfinite(rounded), jnp.abs(rounded - exact), 0)
        found["overflowed"] = finite & ~jnp.isfinite(rounded)
        found["smallest"] = jnp.where(finite & (magnitude > 0), -magnitude, -np.inf)
        if is_low(actual.dtype):
            smallest = float(jnp.finfo(actual.dtype).tiny)
            found["flushed"] = (rounded == 0) & (magnitude > 0)
            found["subnormal"] = (jnp.abs(rounded) > 0) & (jnp.abs(rounded) < smallest)
    totals = dict(zip(COLUMNS, _NOTHING, strict=True)) | _reduced(found)
    if shadow is None:
        totals |= {"shadow_nan": totals["nan"], "shadow_infinite": totals["infinite"]}
    for column in ("nan", "infinite"):
        totals[f"first_{column}"] = jnp.where(totals[column] > 0, -iteration, -np.inf)
    totals |= {"runs": 1, "elements": actual.size}
    return jnp.stack([jnp.asarray(totals[column], jnp.float32) for column in COLUMNS])


def measured_absorbed(actual: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns the measures [columns] that only additions have.

    Args:
      actual: the sum.
      first: an operand, of the same shape or a scalar.
      second: the other one.
    """
    absorbed = ((actual == first) & (second != 0)) | ((actual == second) & (first != 0))
    return _only(absorbed=jnp.sum(absorbed, dtype=jnp.float32))


def measured_whole(local: jax.Array, shadow: jax.Array) -> jax.Array:
    """Returns the measures [columns] that only casts have, of whole numbers.

    Args:
      local: the numbers in the lower precision.
      shadow: the numbers.
    """
    rounded, exact = jnp.ravel(local).astype(shadow.dtype), jnp.ravel(shadow)
    whole = jnp.isfinite(exact) & (exact == jnp.round(exact))
    merged = (rounded[1:] == rounded[:-1]) & (exact[1:] != exact[:-1]) & whole[1:]
    found = {"whole": whole, "whole_rounded": whole & (rounded != exact), "merged": jnp.append(merged, False)}
    return _only(**_reduced(found))


def _only(**totals: jax.Array) -> jax.Array:
    values = dict(zip(COLUMNS, _NOTHING, strict=True)) | totals
    return jnp.stack([jnp.asarray(values[column], jnp.float32) for column in COLUMNS])


def _reduced(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the sums or maxima of arrays of one shape, made in a single pass over them."""
    columns = list(found)
    arrays = tuple(jnp.asarray(found[column]).astype(jnp.float32) for column in columns)
    starts = tuple(np.float32(0 if column in SUMS else -np.inf) for column in columns)

    def add(first: Sequence[jax.Array], second: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        pairs = zip(columns, first, second, strict=True)
        return tuple(a + b if column in SUMS else lax.max(a, b) for column, a, b in pairs)

    results = lax.reduce(arrays, starts, add, tuple(range(arrays[0].ndim)))
    return dict(zip(columns, results, strict=True))
