"""`OperationNumerics`: the effect of half precision on one operation, and its description in the user's terms."""

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.tools.diagnosing.arithmetic import decides, decision_of, dtype_of
from jmp_train.tools.diagnosing.equations import LAYERS, Direction, Site, frames_of
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


_POLICIES = os.path.join("policies", "dtype_policies")
_STEPS = os.path.join("jmp_train", "steps")
_LOSS, _REDUCED = "float32_scalar", ("reduce_gradients", "scatter_gradients")
_JAX = os.path.dirname(jax.__file__)
_MODULES = (jax.nn, jnp.linalg, jax.scipy.special, jnp)
_LAYER = re.compile(r"([A-Z]\w*)\.__call__$")
_WRAPPERS = frozenset(("vectorize", "Module"))  # which call what the user has written
# Functions of one primitive, which says as much. Those of `_MODULES` that it is named for need no entry.
_PLAIN = frozenset(
    ("matmul", "power", "inner", "vdot", "einsum", "tensordot", "asarray", "array", "where", "clip", "astype")
)


def function_called(site: Site) -> str:
    """Returns the function or layer around an operation that the user's line called; empty if unknown.

    Args:
      site: the operation.
    """
    primitive = site.equation.primitive.name
    names = [name for file, function in frames_of(site) if (name := _public(file, function, primitive))]
    return names[-1] if names and site.line else ""


def _public(file: str, function: str, primitive: str) -> str:
    """Returns the public name of a frame's function, or the class of a layer; empty if it is not of interest."""
    if file.startswith(_JAX):
        is_plain = function in _PLAIN or function in primitive or primitive in function
        return function if not is_plain and function not in _WRAPPERS and _is_of_jax(function) else ""
    if layer := _LAYER.match(function):
        return layer[1] if layer[1] not in _WRAPPERS else ""
    return function if file.startswith(os.path.dirname(optax.__file__)) and hasattr(optax, function) else ""


def _is_of_jax(function: str) -> bool:
    found = next((getattr(module, function) for module in _MODULES if hasattr(module, function)), None)
    return callable(found) and not isinstance(found, jnp.ufunc | type)


def argument_of(site: Site, arguments: Mapping[int, str]) -> str:
    """Returns the path of the argument that an operation casts, in the forward pass; empty if it does not.

    Args:
      site: the operation.
      arguments: paths of the arguments by number.
    """
    if site.equation.primitive.name != "convert_element_type" or site.direction == "backward":
        return ""
    (source, *others) = site.sources or (0,)
    return "" if others or source >= 0 else arguments.get(-1 - source, "")


def is_by_policy(site: Site) -> bool:
    """Returns whether a policy, not the user, casts the arguments here."""
    return any(_POLICIES in file for file, _ in frames_of(site))


def is_of_graphs(site: Site) -> bool:
    """Returns whether the user called an operation on graphs, which stores rows in half precision."""
    return any(file.startswith(LAYERS) for file, _ in frames_of(site))


def is_reduction(site: Site) -> bool:
    """Returns whether the library averages gradients over devices here."""
    return any(function in _REDUCED for _, function in frames_of(site))


def is_loss(site: Site) -> bool:
    """Returns whether the train step casts the loss to float32 here, or its derivative back to half precision."""
    return any(function == _LOSS for _, function in frames_of(site))


def subject_of(
    site: Site, row: int, arguments: Mapping[int, str], results: Sequence[tuple[str, frozenset[int]]]
) -> str:
    """Returns the description of an operation without a line; empty if it has one.

    Args:
      site: the operation.
      row: number of the row.
      arguments: paths of the arguments by number.
      results: descriptions of the results, and the rows from which they come.
    """
    if site.line:
        return ""
    if path := argument_of(site, arguments):
        return f"the argument {path!r}"
    if is_loss(site):
        return "the loss" if site.direction == "forward" else "the derivative of the loss"
    if is_reduction(site):
        return "the mean of the gradients over the devices"
    ends = [name for name, rows in results if row in rows]
    if len(ends) == 1:
        return ends[0]
    if any(_STEPS in file for file, _ in frames_of(site)):
        return "the train step itself, outside of your functions"
    return "a cast of autocast's" if site.under_autocast else "an operation of which jax knows no line"
