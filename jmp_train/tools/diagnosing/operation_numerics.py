"""`OperationNumerics`: the effect of half precision on one operation, as fractions and magnitudes."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jmp_train.tools.diagnosing.arithmetic import decides, decision_of, dtype_of
from jmp_train.tools.diagnosing.equations import Direction, Site
from jmp_train.tools.diagnosing.measures import COLUMNS


@dataclasses.dataclass(frozen=True)
class OperationNumerics:
    """One operation of a diagnosed function, over all of its runs, loop iterations and devices.

    Attributes:
      primitive: the name of its jax primitive.
      direction: "forward", "backward" or "update".
      path: path of the modules and scopes around it.
      file: file of the user's line, or of the library that the user called.
      line: number of that line; 0 if unknown.
      dtypes_in: dtypes of its operands, but for random keys.
      dtype: dtype of its result.
      shape: shape of its result, on one device.
      runs: number of measured runs.
      overflowed: fraction of elements that became infinite or NaN here and are finite in the shadow.
      flushed: fraction of elements that became zero here and are not in the shadow.
      subnormal: fraction of nonzero elements below the smallest normal number of the dtype.
      nan: fraction of elements that are NaN in the function.
      infinite: fraction of elements that are infinite in the function.
      absorbed: for additions in lower precision, the fraction of elements that an operand did not change.
      whole_rounded: for casts, the fraction of elements that are whole numbers and were rounded.
      merged: for casts, the fraction of whole numbers that differ from the previous one only before the cast.
      decided: for whole numbers and booleans made of floats, the fraction of elements that are others in float32.
      largest: largest magnitude in the shadow.
      smallest: smallest nonzero magnitude in the shadow; 0 if there is none.
      local_error: error of this operation by itself, |half - float32| / |float32|, each summed over the elements; the
        operands are those of the shadow, rounded.
      worst_error: the largest local error of a run, loop iteration or device.
      inherited_error: the same with the errors of all earlier operations.
      lost_terms: for sums in lower precision, the lost fraction of the terms, |half - float32| / sum of |terms|;
        cancellation does not count.
      subject: its description if the user has no line for it: an argument's path, the loss, the update of a leaf.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> row, = jt.diagnose(lambda x: x * x, jnp.full(3, 300.0, jnp.float16)).rows
      >>> row.primitive, row.overflowed, row.largest
      ('mul', 1.0, 90000.0)
    """

    primitive: str
    direction: Direction
    path: str
    file: str
    line: int
    dtypes_in: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    runs: int
    overflowed: float
    flushed: float
    subnormal: float
    nan: float
    infinite: float
    absorbed: float
    whole_rounded: float
    merged: float
    decided: float
    largest: float
    smallest: float
    local_error: float
    worst_error: float
    inherited_error: float
    lost_terms: float
    subject: str = ""


_SHARES = ("overflowed", "flushed", "subnormal", "nan", "infinite", "absorbed", "whole_rounded", "merged", "decided")


def row_of(site: Site, measures: np.ndarray, subject: str) -> OperationNumerics:
    """Returns the row of an equation.

    Args:
      site: the equation.
      measures: [columns].
      subject: its description if no line of the user's made it.
    """
    values = dict(zip(COLUMNS, map(float, measures), strict=True))
    equation = site.equation
    floats = [v for v in equation.outvars if jnp.issubdtype(dtype_of(v), jnp.floating)]
    result = equation.outvars[decision_of(equation) or 0] if decides(equation) or not floats else floats[0]
    file, _, line = site.line.rpartition(":")
    elements = max(values["elements"], 1.0)
    return OperationNumerics(
        primitive=equation.primitive.name,
        direction=site.direction,
        path=site.path,
        file=file,
        line=int(line or 0),
        dtypes_in=tuple(str(dtype) for dtype in map(dtype_of, equation.invars) if isinstance(dtype, np.dtype)),
        dtype=str(result.aval.dtype),
        shape=tuple(result.aval.shape),
        runs=int(values["runs"]),
        largest=max(values["largest"], 0.0),
        smallest=max(-values["smallest"], 0.0) if np.isfinite(values["smallest"]) else 0.0,
        local_error=_ratio(values["local_error"], values["shadow_magnitude"]),
        worst_error=max(values["worst_error"], 0.0),
        inherited_error=_ratio(values["inherited_error"], values["shadow_magnitude"]),
        subject=subject,
        lost_terms=_ratio(values["local_error"], values["shadow_terms"]) if values["shadow_terms"] else 0.0,
        **{name: values[name] / elements for name in _SHARES},
    )


def _ratio(error: float, whole: float) -> float:
    if error == 0:
        return 0.0
    return error / whole if whole else float("inf")
