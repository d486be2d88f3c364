"""Reports of the operations of a traced program: precision and cost of each, and a table."""

import dataclasses
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn

from jmp_train.policies.autocasting.primitives import ENTERED, PRODUCTS, is_complex
from jmp_train.policies.autocasting.source_lines import source_of
from jmp_train.policies.files import aligned
from jmp_train.policies.programs import programs_in, repeats_of

_HOLD_PROGRAMS = ENTERED | {"core_call", "custom_vmap_call", "xla_pmap"}
_HALVES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")  # and narrower types
_FLOATS = re.compile("float|complex")

Dtypes = tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class OperationReport:
    """A report of one operation.

    Attributes:
      operation: the name of its jax primitive.
      path: the path of its modules and scopes.
      source: file and line of the innermost code outside of jax.
      dtypes_in: the dtypes of its operands.
      dtypes_out: the dtypes of its results.
      rule: a `Rule`; for products in float32, the one that has their precision.
      reason: the reason for the rule.
      flops: the number of floating-point operations, in all iterations of a `scan` together.
      elements: the number of elements of its results, in the same iterations.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from jmp_train import explain_autocast
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> row, = explain_autocast(lambda x: x @ x, x).operations
      >>> row.operation, row.dtypes_in, row.rule, row.flops, row.in_half
      ('dot_general', ('float16', 'float16'), 'lower', 1024, True)
    """

    operation: str
    path: str
    source: str
    dtypes_in: tuple[str, ...]
    dtypes_out: tuple[str, ...]
    rule: str
    reason: str
    flops: int
    elements: int

    @property
    def in_half(self) -> bool:
        """True if the operation computes in half precision or in fewer bits."""
        if self.rule == "fp8":
            return True
        floats = [dtype for dtype in self.dtypes_in if _FLOATS.search(dtype)]
        return bool(floats) and all(dtype in _HALVES for dtype in floats)


@dataclasses.dataclass(frozen=True)
class OperationsReport:
    """A report of a function's operations.

    Attributes:
      operations: the operations, in the order in which they run.

    Example:
      >>> OperationsReport(()).rows()
      []
    """

    operations: tuple[OperationReport, ...]

    @property
    def half_flops_share(self) -> float:
        """The fraction of floating-point operations that run in half precision, from 0 to 1."""
        return half_share(self.operations)

    @property
    def half_elements_share(self) -> float:
        """The fraction of the elements of floating results that are stored in half precision, from 0 to 1."""
        floats = [row for row in self.operations if any(_FLOATS.search(dtype) for dtype in row.dtypes_out)]
        half = sum(row.elements for row in floats if all(dtype in _HALVES for dtype in row.dtypes_out))
        return half / max(1, sum(row.elements for row in floats))

    def rows(self) -> list[dict[str, Any]]:
        """Returns the operations as a list of dictionaries."""
        return [dataclasses.asdict(operation) for operation in self.operations]


def report_of(
    equations: Sequence[Any],
    path: str,
    repeats: int,
    decided: tuple[str, str],
    dtypes: tuple[tuple[str, ...], tuple[str, ...]],
) -> OperationReport:
    """Returns the report of an operation.

    Args:
      equations: the equations around it, the outermost first, and its own.
      path: the path of its modules and scopes.
      repeats: the number of times that the loops around it run.
      decided: its rule and the reason for it.
      dtypes: the dtypes of its operands and of its results.
    """
    cost = repeats * flops_of(equations[-1]), repeats * elements_of(equations[-1])
    return OperationReport(equations[-1].primitive.name, path, source_of(equations), *dtypes, *decided, *cost)


def half_share(operations: Sequence[Any]) -> float:
    """Returns the fraction of the flops that run in half precision, from 0 to 1.

    Args:
      operations: objects with the attributes `flops` and `in_half`.
    """
    total = sum(operation.flops for operation in operations)
    half = sum(operation.flops for operation in operations if operation.in_half)
    return half / total if total else 0.0


def table(operations: Sequence[OperationReport]) -> list[str]:
    """Returns the lines of a table of operations."""
    head = ("operation", "in", "out", "rule", "decided by", "path", "source")
    lines = [
        (
            operation.operation,
            " ".join(operation.dtypes_in),
            " ".join(operation.dtypes_out),
            operation.rule,
            operation.reason,
            operation.path,
            operation.source,
        )
        for operation in operations
    ]
    return aligned([head, *lines])


def flops_of(equation: Any) -> int:
    """Returns the number of an equation's floating-point operations; loops and axes of unknown length count once."""
    if held := held_jaxprs(equation):  # a program that ran as it was traced
        inner = sum(flops_of(e) for jaxpr in held for e in jaxpr.eqns)
        return repeats_of(equation) * inner
    size = elements_of(equation)
    size *= 4 if equation.primitive.name in PRODUCTS and any(map(is_complex, equation.invars)) else 1
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            return 2 * size * _size(equation.invars[0].aval.shape[i] for i in contracted)
        case "ragged_dot" | "ragged_dot_general":
            return 2 * size * _ragged_contraction(equation)
        case "conv_general_dilated":
            kernel, features = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec[0]
            return 2 * size * _size(n for i, n in enumerate(kernel) if i != features)
        case "reduce_sum" | "reduce_max" | "reduce_min" | "reduce_prod":
            return _size(equation.invars[0].aval.shape)
        case "reshape" | "transpose" | "broadcast_in_dim" | "convert_element_type" | "slice":
            return 0
    return size


def elements_of(equation: Any) -> int:
    """Returns the number of elements of an equation's results."""
    return sum(_size(getattr(out.aval, "shape", ())) for out in equation.outvars)


def _size(shape: Iterable[Any]) -> int:
    return math.prod(n for n in shape if isinstance(n, int))  # not symbolic


def _ragged_contraction(equation: Any) -> int:
    dimensions = equation.params.get("ragged_dot_dimension_numbers")
    if dimensions is None:
        return _size(equation.invars[0].aval.shape[-1:])
    (contracted, _), _ = dimensions.dot_dimension_numbers
    return _size(equation.invars[0].aval.shape[i] for i in contracted)


def held_jaxprs(equation: JaxprEqn) -> list[Any]:
    """Returns the open jaxprs that an equation runs; an empty list if it counts as one operation."""
    return programs_in(equation) if equation.primitive.name in _HOLD_PROGRAMS else []


def is_float32(atom: Any) -> bool:
    """Returns whether an array, variable or literal has floats of more than 16 bits, or complex numbers."""
    dtype = getattr(getattr(atom, "aval", atom), "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact) and jnp.finfo(dtype).bits > 16
