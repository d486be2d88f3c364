"""Functions opaque to autocast: it calls them with arrays in its dtypes instead of running their trace.

A kernel with a custom gradient stores and computes in the dtypes of its arguments. Autocast traces every function in
float32, so such a kernel would store float32 copies of half values. The traced program therefore carries the function
itself, as the policy of a `jax.checkpoint` that recomputes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from jmp_train.policies.autocasting.product_gradients import Contract

Args = ParamSpec("Args")
Result = TypeVar("Result")


class OpaqueCall:
    """A checkpoint policy that stores everything and carries a function."""

    def __init__(self, run: Callable[..., Any], contract: Contract | None = None) -> None:
        self.run = run
        self.contract = contract

    def __call__(self, *_: object, **__: object) -> bool:
        """Returns True: every value is stored."""
        return True


def opaque_to_autocast(fn: Callable[Args, Result], *, contract: Contract | None = None) -> Callable[Args, Result]:
    """Returns a function that computes in the dtypes of its arguments, also within autocast regions.

    Args:
      fn: a function from pytrees of arrays to a pytree of arrays. It must not close over traced values.
      contract: if `fn` is a matrix product of two arrays without batch dimensions, the dimensions that it contracts in
        the first and in the second array, in pairs. The rule "fp8" then computes it in 8 bits; the result has the dtype
        that `fn` returns for float32 arrays. None for every other function.

    Returns:
      A function that, within autocast regions, calls `fn` with arguments in the dtypes that they have there, which may
      be half. Outside of such regions it is the same as `fn`.

    Example:
      >>> import jax.numpy as jnp
      >>> from jmp_train import autocast
      >>> square = opaque_to_autocast(lambda x: (x.astype("float32") ** 2).astype(x.dtype))
      >>> autocast(lambda x, w: square(x @ w))(jnp.ones((2, 3)), jnp.ones((3, 2))).dtype.name
      'float16'
    """

    @functools.wraps(fn)
    def carried(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        leaves, tree = jax.tree.flatten((args, kwargs))
        call: Any = fn

        def run(*leaves: object) -> Any:
            arguments: Any = jax.tree.unflatten(tree, leaves)
            return call(*arguments[0], **arguments[1])

        return jax.checkpoint(run, prevent_cse=False, policy=OpaqueCall(run, contract))(*leaves)

    return carried
