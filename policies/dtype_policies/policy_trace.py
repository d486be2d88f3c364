"""Traces a function under a policy, to analyze its operations; nothing is computed."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jmp_train.policies.autocasting import FlatCall, argument_names, chosen, is_float32
from jmp_train.policies.dtype_policies.arguments import cast_arguments
from jmp_train.policies.dtype_policies.float32_origins import (
    Origin,
    TracedOperation,
    traced_operations,
)
from jmp_train.policies.dtype_policies.path_policy import PathPolicy
from jmp_train.policies.dtype_policies.policy import AutocastPolicy, Policy
from jmp_train.policies.pytrees import named_leaves


def computes_in_half(policy: Policy | PathPolicy | None) -> bool:
    """Returns whether a policy passes parameters or inputs in half precision, unlike autocast."""
    if policy is None or isinstance(policy.default, AutocastPolicy):
        return False
    rules = [rule for _, rule in policy.rules] if isinstance(policy, PathPolicy) else []
    return any(np.dtype(p.compute_dtype).itemsize == 2 for p in (policy.default, *rules))


def computes_in_float16(policy: Policy | PathPolicy) -> bool:
    """Returns whether a policy computes anything in float16, by autocast or by casts."""
    if isinstance(policy.default, AutocastPolicy) and policy.default.autocast_dtype == np.float16:
        return True
    rules = [rule for _, rule in policy.rules] if isinstance(policy, PathPolicy) else []
    return any(np.dtype(p.compute_dtype) == np.float16 for p in (policy.default, *rules))


def operations_under(
    fn: Callable[..., Any],
    policy: Policy | PathPolicy | None,
    args: Sequence[Any],
    kwargs: dict[str, Any],
    *,
    uncast: Sequence[Any] = (),
    names: Sequence[str] | None = None,
) -> list[TracedOperation]:
    """Returns the operations of `fn(*args, *uncast, **kwargs)`, with the arguments cast by a policy.

    Args:
      fn: the function; a path policy follows its first argument.
      policy: None casts nothing.
      args: pytrees; `jax.ShapeDtypeStruct` works in place of arrays, and other leaves are passed on.
      kwargs: keyword arguments, likewise.
      uncast: further arguments, which no policy casts.
      names: names of the arguments, for reports; None takes the function's own.

    Raises:
      Exception: any error of `fn` during tracing.
    """
    names = argument_names(fn, len(args)) if names is None else names
    call = FlatCall(((*args, *uncast), kwargs), {})

    def cast(given: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if policy is None:
            return given, kwargs
        with cast_arguments(policy, given[: len(args)], kwargs) as (inputs, keywords):
            return jax.tree.leaves(((*inputs, *given[len(args) :]), keywords))

    avals = jax.make_jaxpr(call.of_arrays(cast))(*call.avals).out_avals
    jaxpr = jax.make_jaxpr(call.of_arrays(lambda given, kwargs: fn(*given, **kwargs)))(*avals)
    pairs = zip(names, (*args, *uncast), strict=True)
    named = [leaf for name, x in (*pairs, *sorted(kwargs.items())) for leaf in named_leaves({name: x})]
    paths = [path for path, _ in named]
    parameters = f"{names[0]}/" if args else ""
    origins = [
        Origin(
            f"{path!r}, which the policy does not cast",
            of_policy=bool(parameters) and f"{path}/".startswith(parameters),
        )
        if is_float32(variable)
        else None
        for path, variable in zip(chosen(paths, call.are_arrays), jaxpr.jaxpr.invars, strict=True)
    ]
    return traced_operations(jaxpr, origins)
