"""What autocast does to a function: a row an operation, the work in half precision, bytes saved."""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocast import autocast, float32_aval, mark_of, run_region
from jmp_train.policies.autocast_control import ENTERED
from jmp_train.policies.autocast_region import Decision, chosen, replaced

_HALVES = ("float16", "bfloat16")
_OURS = os.path.dirname(__file__)
_JAX = os.path.dirname(jax.__file__)


@dataclasses.dataclass(frozen=True)
class OperationReport:
    """One operation.

    Attributes:
      operation: the name of its jax primitive.
      path: of the modules and scopes that it is in.
      source: file and line of the innermost code that is not jax's own.
      dtypes_in: of its operands.
      dtypes_out: of its results.
      rule: "lower", "float32", "promote" or "keep".
      reason: what decided that.
      flops: floating-point operations, of all turns of a `scan` together.

    Example:
      >>> import jax, jax.numpy as jnp
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

    @property
    def in_half(self) -> bool:
        """Whether it computes in half precision."""
        floats = [dtype for dtype in self.dtypes_in if "float" in dtype]
        return bool(floats) and all(dtype in _HALVES for dtype in floats)


@dataclasses.dataclass(frozen=True)
class AutocastReport:
    """What `explain_autocast` returns; printed, it is a table.

    Attributes:
      operations: in the order in which they run.
      residual_bytes_float32: what `jax.vjp` saves for the gradient in float32; None where the
        function has no gradient.
      residual_bytes_autocast: and what it saves under autocast.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = explain_autocast(lambda x, w: jnp.sum(x @ w), x, x)
      >>> len(report.rows()), report.residual_bytes_float32, report.residual_bytes_autocast
      (2, 512, 256)
    """

    operations: tuple[OperationReport, ...]
    residual_bytes_float32: int | None
    residual_bytes_autocast: int | None

    @property
    def half_flops_share(self) -> float:
        """The share of floating-point operations that run in half precision, from 0 to 1."""
        total = sum(operation.flops for operation in self.operations)
        half = sum(operation.flops for operation in self.operations if operation.in_half)
        return half / total if total else 0.0

    def rows(self) -> list[dict[str, Any]]:
        """Returns the operations as dictionaries, for machines."""
        return [dataclasses.asdict(operation) for operation in self.operations]

    def __str__(self) -> str:
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
            for operation in self.operations
        ]
        widths = [max(map(len, column)) for column in zip(head, *lines, strict=True)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in (head, *lines)
        ]
        return "\n".join(
            [*table, f"{self.half_flops_share:.1%} of the flops in half precision"]
        ) + (
            f"\nsaved for the gradient: {self.residual_bytes_float32 / 1e6:.3g} MB in float32, "
            f"{self.residual_bytes_autocast / 1e6:.3g} MB under autocast"
            if self.residual_bytes_float32 is not None and self.residual_bytes_autocast is not None
            else "\nit has no gradient"
        )


def explain_autocast(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> AutocastReport:
    """Says what autocast does with each operation of a function; nothing is computed.

    Args:
      fn: an `autocast(...)`, or a plain function, which is taken with the defaults of `autocast`.
      *args: its arguments; `jax.ShapeDtypeStruct` will do for arrays.
      **kwargs: likewise.

    Returns:
      A report, which prints as a table.

    Raises:
      ValueError: `fn` is an `autocast` with `enabled=False`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = explain_autocast(lambda x: jnp.exp(x @ x), x)
      >>> [(row.operation, row.rule, row.dtypes_out) for row in report.operations]
      [('dot_general', 'lower', ('float16',)), ('exp', 'float32', ('float32',))]
      >>> round(report.half_flops_share, 2)
      0.94
    """
    mark = mark_of(fn) or mark_of(autocast(fn))
    if mark is None or mark.region is None:
        raise ValueError("fn is an autocast with enabled=False: there is nothing to explain")
    plain, region = mark.plain, mark.region
    leaves, tree = jax.tree.flatten((args, kwargs))
    abstract = [_is_abstract(leaf) for leaf in leaves]

    def call(run: Callable[..., Any]) -> Callable[..., Any]:
        def of_arrays(*arrays: Any) -> Any:
            args, kwargs = jax.tree.unflatten(tree, replaced(leaves, abstract, arrays))
            return [x for x in jax.tree.leaves(run(*args, **kwargs)) if isinstance(x, jax.Array)]

        return of_arrays

    avals = [
        x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x)
        for x in chosen(leaves, abstract)
    ]
    log: list[Decision] = []
    logged = dataclasses.replace(region, log=log)
    jax.eval_shape(call(lambda *a, **k: run_region(logged, plain, a, k)), *avals)
    under_autocast = call(lambda *a, **k: run_region(region, plain, a, k))
    wide = [float32_aval(aval) for aval in avals]
    return AutocastReport(
        operations=tuple(_operation(decision) for decision in log),
        residual_bytes_float32=_residual_bytes(call(plain), wide),
        residual_bytes_autocast=_residual_bytes(under_autocast, wide),
    )


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)


def _residual_bytes(fn: Callable[..., Any], avals: list[Any]) -> int | None:
    floats = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals]

    def pullback(*arrays: Any) -> Any:
        def of_floats(*some: Any) -> list[Any]:
            return [
                y
                for y in fn(*replaced(arrays, floats, some))
                if jnp.issubdtype(y.dtype, jnp.floating)
            ]

        return jax.vjp(of_floats, *chosen(arrays, floats))[1]

    try:
        leaves = jax.tree.leaves(jax.eval_shape(pullback, *avals))
    except ValueError:  # what jax raises for the gradient of a callback
        return None
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _operation(decision: Decision) -> OperationReport:
    equation = decision.equation
    return OperationReport(
        operation=equation.primitive.name,
        path=decision.path,
        source=_source((*decision.callers, equation)),
        dtypes_in=decision.dtypes_in,
        dtypes_out=decision.dtypes_out,
        rule=decision.rule,
        reason=decision.reason,
        flops=decision.repeats * _flops(equation),
    )


def _source(equations: tuple[Any, ...]) -> str:
    """Returns the user's line of the innermost equation that has one."""
    for equation in reversed(equations):
        traceback = equation.source_info.traceback
        for frame in () if traceback is None else traceback.frames:
            if not frame.file_name.startswith((_JAX, _OURS, "<")):
                return f"{frame.file_name}:{frame.line_num}"
    return ""


def _flops(equation: Any) -> int:
    if equation.primitive.name in ENTERED:  # a program that was run as it was traced
        return equation.params.get("length", 1) * sum(map(_flops, _held(equation)))
    size = sum(math.prod(getattr(out.aval, "shape", ())) for out in equation.outvars)
    match equation.primitive.name:
        case "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            return 2 * size * math.prod(equation.invars[0].aval.shape[i] for i in contracted)
        case "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            features = kernel[equation.params["dimension_numbers"].rhs_spec[0]]
            return 2 * size * math.prod(kernel) // features
        case "reduce_sum" | "reduce_max" | "reduce_min" | "reduce_prod":
            return math.prod(equation.invars[0].aval.shape)
        case "reshape" | "transpose" | "broadcast_in_dim" | "convert_element_type" | "slice":
            return 0
    return size


def _held(equation: Any) -> list[Any]:
    """Returns the equations of the programs that an equation holds."""
    held = jax.tree.leaves(list(equation.params.values()))
    jaxprs = [x for x in held if isinstance(x, jex.Jaxpr | jex.ClosedJaxpr)]
    return [inner for jaxpr in jaxprs for inner in getattr(jaxpr, "jaxpr", jaxpr).eqns]
