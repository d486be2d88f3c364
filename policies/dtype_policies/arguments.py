"""Casts the arguments of a call to a policy's compute dtypes; nnx objects only during the call."""

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

from jmp_train.policies.dtype_policies.path_policy import PathPolicy
from jmp_train.policies.dtype_policies.policy import Policy
from jmp_train.policies.pytrees import cast_for_call, with_overwritten


@contextlib.contextmanager
def cast_arguments(
    policy: Policy | PathPolicy,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    also: Collection[int] = frozenset(),
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Yields a call's arguments in the compute dtype; the first one holds the parameters.

    In nnx objects, it casts the `nnx.Param`s, and the variables with ids in `also`.
    """
    if not args and policy is not policy.default:
        raise TypeError("a policy_by_path needs the parameters as the first positional argument")

    def cast(call: tuple[tuple[Any, ...], dict[str, Any]]) -> Any:
        args, kwargs = call
        inputs, kwargs = policy.default.cast_to_compute((args[1:], kwargs))
        params = [with_overwritten(policy.cast_to_compute(x), x) for x in args[:1]]
        return (*params, *inputs), kwargs

    with cast_for_call((args, kwargs), cast, also) as call:
        yield call
