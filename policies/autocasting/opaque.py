"""Functions opaque to autocast: called with its arrays, in their dtypes, instead of run as traced.

A kernel with a gradient of its own stores and computes by the dtypes that it is given. Traced in float32, as
autocast traces all, it would save float32 of values that are half; so the traced program has to know the
function. It is carried by the policy of a `jax.checkpoint` that recomputes nothing.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax

from jmp_train.policies.autocasting.product_gradients import Contract

Args = ParamSpec("Args")
Result = TypeVar("Result")


class OpaqueCall:
    """A checkpoint policy that saves everything, and tells which function it is of."""

    def __init__(self, run: Callable[..., Any], contract: Contract | None = None) -> None:
        self.run = run
        self.contract = contract

    def __call__(self, *_: object, **__: object) -> bool:
        """Returns that a value is saved."""
        return True


def opaque_to_autocast(fn: Callable[Args, Result], *, contract: Contract | None = None) -> Callable[Args, Result]:
    """Returns a function that computes by the dtypes of its arguments within autocast regions too.

    Args:
      fn: a function of pytrees of arrays to a pytree of arrays, which closes over no traced values.
      contract: of a matrix product of two arrays without batch dimensions the dimensions that it contracts, of each, in
        pairs: the rule "fp8" multiplies it in 8 bits, as any other, into the dtype that it has in float32. None for
        every other function.

    Returns:
      A function that, within autocast regions, gets its arguments in the dtypes that they have there,
      half among them, and decides by these. Outside it is `fn`.

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
