"""`explain_autocast` reports the precision of each operation, the fraction in half and the bytes stored."""

import dataclasses
import functools
from collections.abc import Callable
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies.autocasting.operations import OperationReport, OperationsReport, report_of, table
from jmp_train.policies.autocasting.program_warnings import unmet_entries, unmet_lines
from jmp_train.policies.autocasting.region import Decision, Region
from jmp_train.policies.autocasting.traced_calls import FlatCall, none_key_explained
from jmp_train.policies.autocasting.transform import AutocastMark, autocast, mark_of, run_region
from jmp_train.policies.autocasting.values import float32_aval, replaced


@dataclasses.dataclass(frozen=True)
class AutocastReport(OperationsReport):
    """The report of `explain_autocast`: the decisions of autocast. It prints as a table.

    Attributes:
      operations: the operations, in the order in which they run.
      residual_bytes_float32: the bytes that `jax.vjp` stores for the gradient in float32; None if the function has no
        gradient.
      residual_bytes_autocast: the bytes that it stores under autocast.
      unmet: the entries of the rules that apply to no operation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = explain_autocast(lambda x, w: jnp.sum(x @ w), x, x)
      >>> len(report.rows()), report.residual_bytes_float32, report.residual_bytes_autocast
      (2, 512, 256)
    """

    residual_bytes_float32: int | None
    residual_bytes_autocast: int | None
    unmet: tuple[str, ...] = ()

    def __str__(self) -> str:
        saved = "it has no gradient"
        if self.residual_bytes_float32 is not None and self.residual_bytes_autocast is not None:
            saved = (
                f"saved for the gradient: {self.residual_bytes_float32 / 1e6:.3g} MB in float32, "
                f"{self.residual_bytes_autocast / 1e6:.3g} MB under autocast"
            )
        share = f"{self.half_flops_share:.1%} of the flops in half precision"
        return "\n".join([*table(self.operations), share, saved, *unmet_lines(self.unmet)])


def explain_autocast(fn: Callable[..., Any], *args: object, **kwargs: object) -> AutocastReport:
    """Returns a report of the precision in which autocast runs each operation of a function.

    Args:
      fn: the result of `autocast`, or a plain function, to which the defaults of `autocast` apply.
      *args: its arguments. Nothing is computed, so `jax.ShapeDtypeStruct` works in place of arrays.
      **kwargs: its keyword arguments.

    Returns:
      The report, which prints as a table.

    Raises:
      ValueError: `fn` was made by `autocast` with `enabled=False`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = explain_autocast(lambda x: jnp.exp(x @ x), x)
      >>> [(row.operation, row.rule, row.dtypes_out) for row in report.operations]
      [('dot_general', 'lower', ('float16',)), ('exp', 'float32', ('float32',))]
      >>> round(report.half_flops_share, 2)
      0.94
    """
    plain, region = explained_region(mark_of(fn) or mark_of(autocast(fn)))
    call = FlatCall(args, kwargs)
    in_float32 = [float32_aval(aval) for aval in call.avals]
    under_autocast = call.of_arrays(lambda *a, **k: run_region(region, plain, a, k))
    with none_key_explained(plain, args, kwargs):
        operations = decided(region, lambda region, *a, **k: run_region(region, plain, a, k), call)
    return AutocastReport(
        operations=operations,
        unmet=unmet_entries(region),
        residual_bytes_float32=_residual_bytes(call.of_arrays(plain), in_float32),
        residual_bytes_autocast=_residual_bytes(under_autocast, in_float32),
    )


def explained_region(mark: AutocastMark | None) -> tuple[Callable[..., Any], Region]:
    """Returns the plain function that autocast runs, and its region, which collects the traced programs.

    Raises:
      ValueError: autocast is not enabled.
    """
    if mark is None or mark.region is None:
        raise ValueError("fn is an autocast with enabled=False: there is nothing to explain")
    return mark.plain, dataclasses.replace(mark.region, programs=[], refused=[])


def decided(region: Region, run: Callable[..., Any], call: FlatCall) -> tuple[OperationReport, ...]:
    """Returns one report per operation with the decision of autocast.

    Args:
      region: the autocast region.
      run: a function, called as `run(region, *args, **kwargs)`.
      call: its arguments, without the region.
    """
    log: list[Decision] = []
    logged = dataclasses.replace(region, log=log)
    jax.eval_shape(call.of_arrays(functools.partial(run, logged)), *call.avals)
    return tuple(map(_operation, log))


def _residual_bytes(fn: Callable[..., Any], avals: list[Any]) -> int | None:
    floats = [jnp.issubdtype(aval.dtype, jnp.floating) for aval in avals]

    def pullback(*arrays: object) -> Any:
        def of_floats(*some: object) -> list[Any]:
            return [y for y in fn(*replaced(arrays, floats, some)) if jnp.issubdtype(y.dtype, jnp.floating)]

        return jax.vjp(of_floats, *compress(arrays, floats))[1]

    try:
        leaves = jax.tree.leaves(jax.eval_shape(pullback, *avals))
    except ValueError:  # jax raises it for the gradient of a callback
        return None
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _operation(decision: Decision) -> OperationReport:
    decided, dtypes = (decision.rule, str(decision.reason)), (decision.dtypes_in, decision.dtypes_out)
    return report_of((*decision.callers, decision.equation), decision.path, decision.repeats, decided, dtypes)
