"""`apply_policy`: casts a function's arguments and result, and checks its products once."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from jmp_train.policies.autocasting import none_key_explained
from jmp_train.policies.dtype_policies.arguments import cast_arguments
from jmp_train.policies.dtype_policies.half_products import FirstTrace, mixed_dtypes_explained
from jmp_train.policies.dtype_policies.path_policy import PathPolicy, named_policy
from jmp_train.policies.dtype_policies.policy import Policy
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
      Float32ProductsWarning: on the first call or trace, which traces `fn` once more.
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
        first_trace.look(plain, policy, args, kwargs)
        explained = none_key_explained(plain, args, kwargs)
        with explained, mixed_dtypes_explained(policy), cast_arguments(policy, args, kwargs) as call:
            compute_args, compute_kwargs = call
            result = run(*compute_args, **compute_kwargs)
        return cast_results(result, policy.default.cast_to_output)

    return with_policy
