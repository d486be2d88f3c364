"""Half-precision products that are summed in float32, within and over devices."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies.autocasting.opaque import opaque_to_autocast
from jmp_train.policies.autocasting.product_gradients import Contract, operand_gradients
from jmp_train.policies.autocasting.transform import autocast_as
from jmp_train.policies.pytrees import at_least_float32


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


@autocast_as("lower")
def _as_operand(x: jax.Array) -> jax.Array:
    return x * jnp.ones((), x.dtype)  # an operation that autocast casts; XLA removes it


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _product(contract: Contract, precision: Any, lhs: jax.Array, rhs: jax.Array) -> Any:
    sum_dtype = at_least_float32(lhs.dtype)
    product = lax.dot_general(lhs, rhs, (contract, ((), ())), precision, preferred_element_type=sum_dtype)
    return product.astype(lhs.dtype)


def _forward(contract: Contract, precision: object, lhs: jax.Array, rhs: jax.Array) -> Any:
    return _product(contract, precision, lhs, rhs), (lhs, rhs)


def _backward(
    contract: Contract,
    precision: object,
    inputs: tuple[jax.Array, jax.Array],
    cotangent: jax.Array,
) -> Any:
    lhs, rhs = inputs
    return operand_gradients(
        contract,
        (lhs.shape, rhs.shape),
        lambda dimensions: _product(dimensions, precision, cotangent, rhs),
        lambda dimensions: _product(dimensions, precision, cotangent, lhs),
    )


_product.defvjp(_forward, _backward)
