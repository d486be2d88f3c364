"""Functions opaque to autocast: it calls them with arrays in its dtypes instead of running their trace.

A kernel with a custom gradient stores and computes in the dtypes of its arguments. Autocast traces every function in
float32, so such a kernel would store float32 copies of half values. The traced program therefore carries the function
itself, as the policy of a `jax.checkpoint` that recomputes nothing. `float32_dot_general` is such a function.
"""

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jmp_train.policies.autocasting.region import DECIDED
from jmp_train.policies.pytrees import at_least_float32

Args = ParamSpec("Args")
Result = TypeVar("Result")

Contract = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions of lhs and of rhs, in pairs


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


def float32_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: object = None,
    preferred_element_type: object = None,
    **unused: object,
) -> jax.Array:
    """Computes `jax.lax.dot_general` with float32 sums, and rounds the result to the inputs' dtype.

    A single GPU does so by default. If the contracted dimension is sharded over devices, as in the second of two
    tensor-parallel dense layers, jax adds the devices' partial sums in the dtype of the product. In float16, sums above
    65504 become infinite. This function adds them in float32, also in the gradients. Pass it to layers, such as
    `flax.linen.Dense(dot_general=...)`.

    Args:
      lhs: floating array.
      rhs: floating array of the same dtype.
      dimension_numbers: ((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch)), as for `dot_general`; the batch
        dimensions must be empty.
      precision: as for `dot_general`.
      preferred_element_type: the dtype of the result; None for the dtype of the inputs.
      **unused: other arguments that layers pass to `dot_general`; they must be None.

    Returns:
      The product.

    Raises:
      ValueError: there are batch dimensions, or one of the other arguments is not None.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.full((1, 2), 300, jnp.float16), jnp.ones((2, 1), jnp.float16)
      >>> float32_dot_general(x, w, (((1,), (0,)), ((), ())))
      Array([[600.]], dtype=float16)

    Reference: Shoeybi et al., "Megatron-LM", https://arxiv.org/abs/1909.08053.
    """
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dimension_numbers
    if lhs_batch or rhs_batch:
        raise ValueError(
            f"dimension_numbers={dimension_numbers} have batch dimensions, which float32_dot_general does not support"
        )
    given = {name: value for name, value in unused.items() if value is not None}
    if given:
        raise ValueError(f"float32_dot_general has no argument {', '.join(given)}")
    contract = tuple(lhs_contract), tuple(rhs_contract)
    # The rules of autocast would give the product the half type that is meant for its operands.
    product = opaque_to_autocast(functools.partial(_product, contract, precision))
    result: Any = product(_as_operand(lhs), _as_operand(rhs))
    return result if preferred_element_type is None else result.astype(preferred_element_type)


def _as_operand(x: jax.Array) -> jax.Array:
    with jax.named_scope(f"{DECIDED}:lower"):
        return x * jnp.ones((), x.dtype)  # an operation that autocast casts; XLA removes it


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(contract: Contract, precision: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
    sum_dtype = at_least_float32(lhs.dtype)
    product = lax.dot_general(lhs, rhs, (contract, ((), ())), precision, preferred_element_type=sum_dtype)
    return product.astype(lhs.dtype)


def _forward(contract: Contract, precision: object, lhs: jax.Array, rhs: jax.Array) -> Any:
    return _product(contract, precision, lhs, rhs), (lhs, rhs)


def _backward(contract: Contract, precision: object, inputs: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> Any:
    lhs, rhs = inputs
    lhs_contract, rhs_contract = contract
    lhs_free, rhs_free = (_others(x.ndim, dims) for x, dims in zip(inputs, contract, strict=True))
    of_lhs = tuple(range(len(lhs_free)))  # dimensions of the cotangent
    of_rhs = tuple(range(len(lhs_free), cotangent.ndim))
    for_lhs = _product((of_rhs, rhs_free), precision, cotangent, rhs)
    for_rhs = _product((of_lhs, lhs_free), precision, cotangent, lhs)
    return (
        _like(for_lhs, lhs_free, lhs_contract, rhs_contract),
        _like(for_rhs, rhs_free, rhs_contract, lhs_contract),
    )


def _others(count: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i not in dimensions)


def _like(grads: Any, free: tuple[int, ...], contract: tuple[int, ...], partners: tuple[int, ...]) -> jax.Array:
    """Returns gradients with an operand's order of dimensions; they come free first, then in the partner's order."""
    order = [contract[partners.index(partner)] for partner in sorted(partners)]
    return jnp.transpose(grads, np.argsort([*free, *order]).tolist())


_product.defvjp(_forward, _backward)
