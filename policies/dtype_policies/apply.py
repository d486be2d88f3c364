"""Runs a function under a policy (`apply_policy`), or reports its operations and their precision (`explain_policy`)."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, ParamSpec, TypeVar

from jmp_train.policies.autocasting import (
    PRODUCTS,
    FlatCall,
    OperationReport,
    OperationsReport,
    decided,
    explained_region,
    half_share,
    mark_of,
    none_key_explained,
    report_of,
    run_region,
    table,
    unmet_entries,
    unmet_lines,
)
from jmp_train.policies.dtype_policies.half_products import FirstTrace, mixed_dtypes_explained
from jmp_train.policies.dtype_policies.policy import AutocastPolicy, PathPolicy, Policy, named_policy
from jmp_train.policies.dtype_policies.policy_trace import TracedOperation, cast_arguments, operations_under
from jmp_train.policies.pytrees import cast_results, unbound

Args = ParamSpec("Args")
Result = TypeVar("Result")


def apply_policy(fn: Callable[Args, Result], policy: Policy | PathPolicy | str) -> Callable[Args, Result]:
    """Returns `fn` with its arguments cast to the compute dtype and its result to the output dtype.

    Differentiating the new function gives gradients in the dtypes of the arguments as passed, so
    float32 parameters get float32 gradients.

    Args:
      fn: a function of pytrees. Under a `policy_by_path` its first positional argument holds the
        parameters, as in `jax.grad`: the rules apply to it, the default to the others. Or an
        nnx module, or a method of one, with the module's parameters.
      policy: the policy, or the name of one.

    Returns:
      A function with the same signature. Leaves that are not floating arrays stay unchanged. The parameters of flax nnx
      objects are cast while the function runs; its changes to their other state, such as batch statistics, random
      counts and caches, are made to the caller's objects.

    Raises:
      TypeError: `policy` is of another type; when called under a `policy_by_path`, the parameters are not passed
        by position.

    Warns:
      Float32ProductsWarning: on the first call or trace. A call outside of jit and grad traces `fn` for it.
      CpuConvolutionWarning: `fn` has bfloat16 convolutions that this jaxlib may compute wrong on CPUs.

    Example:
      >>> import jax.numpy as jnp
      >>> dot = apply_policy(jnp.dot, "mixed_float16")
      >>> float(dot(jnp.float32(1.0001), jnp.float32(1.0)))  # computed in float16
      1.0
    """
    if not callable(fn):
        raise TypeError(f"fn must be a function or a module, got {fn!r}")
    policy = named_policy(policy)
    plain, module = unbound(fn)
    run = policy.default.transform(plain)
    first_trace = FirstTrace()

    @functools.wraps(fn)
    def with_policy(*inputs: Args.args, **kwargs: Args.kwargs) -> Result:
        args = (*module, *inputs)
        explained, look = none_key_explained(plain, args, kwargs), first_trace.look(plain, policy, args, kwargs)
        with look, explained, mixed_dtypes_explained(policy), cast_arguments(policy, args, kwargs) as call:
            compute_args, compute_kwargs = call
            result = run(*compute_args, **compute_kwargs)
        return cast_results(result, policy.default.cast_to_output)

    return with_policy


@dataclasses.dataclass(frozen=True)
class PolicyReport(OperationsReport):
    """The report of `explain_policy`, which prints as a table.

    Attributes:
      operations: the operations in the order in which they run.
      unmet: the entries of an `AutocastPolicy`'s rules that apply to no operation.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> report = explain_policy(lambda w, x: jnp.tanh(x @ w), "mixed_float16", x, x)
      >>> len(report.rows()), report.half_flops_share, report.half_products_share
      (2, 1.0, 1.0)
    """

    unmet: tuple[str, ...] = ()

    @property
    def half_products_share(self) -> float:
        """The fraction of the flops of matrix products and convolutions in half precision, from 0 to 1."""
        return half_share([row for row in self.operations if row.operation in PRODUCTS])

    def __str__(self) -> str:
        shares = (
            f"{self.half_flops_share:.1%} of the flops in half precision, "
            f"{self.half_products_share:.1%} of those of products"
        )
        return "\n".join([*table(self.operations), shares, *unmet_lines(self.unmet)])


def explain_policy(
    fn: Callable[..., Any], policy: Policy | PathPolicy | str | None, *args: object, **kwargs: object
) -> PolicyReport:
    """Returns a report of the precision of each operation of a function under a policy; nothing is computed.

    Args:
      fn: a function for `apply_policy`, such as a loss or a linen module's `apply`.
      policy: the policy, or its name. Under a `policy_by_path` the first of `args` holds the
        parameters. None casts nothing, as for a whole step that casts by itself.
      *args: its arguments; `jax.ShapeDtypeStruct` works in place of arrays.
      **kwargs: its keyword arguments.

    Returns:
      A report, which prints as a table. The column "decided by" has the rule of an `AutocastPolicy`; under other
      policies, the reason why an operation does not run in half precision.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
      >>> fn = lambda w, x: x.astype(jnp.float32) @ w.astype(jnp.float32)
      >>> row = explain_policy(fn, "mixed_float16", x, x).operations[-1]
      >>> row.operation, row.dtypes_in, row.reason.split(" at ")[0]
      ('dot_general', ('float32', 'float32'), 'cast from float16 to float32')
      >>> explain_policy(fn, "autocast_float16", x, x).operations[-1].dtypes_in
      ('float16', 'float16')
    """
    policy = None if policy is None else named_policy(policy)
    fn, module = unbound(fn)
    args = (*module, *args)
    with mixed_dtypes_explained(policy), none_key_explained(fn, args, kwargs):
        if policy is not None and isinstance(policy.default, AutocastPolicy):
            return _under_autocast(fn, policy, args, kwargs)
        return PolicyReport(tuple(map(_row, operations_under(fn, policy, args, kwargs))))


def _under_autocast(
    fn: Callable[..., Any], policy: Policy | PathPolicy, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> PolicyReport:
    plain, region = explained_region(mark_of(policy.default.transform(fn)))

    def run(region: Any, *args: object, **kwargs: object) -> Any:
        with cast_arguments(policy, args, kwargs) as call:
            return run_region(region, plain, *call)

    operations = decided(region, run, FlatCall(args, kwargs))
    return PolicyReport(operations, unmet_entries(region))


def _row(operation: TracedOperation) -> OperationReport:
    origin, equation = operation.origin, operation.equation
    reason = "" if origin is None else str(origin)
    dtypes = _dtypes(equation.invars), _dtypes(equation.outvars)
    return report_of(operation.equations, operation.path, operation.repeats, ("keep", reason), dtypes)


def _dtypes(atoms: Iterable[Any]) -> tuple[str, ...]:
    return tuple(str(atom.aval.dtype) for atom in atoms if hasattr(atom.aval, "dtype"))
