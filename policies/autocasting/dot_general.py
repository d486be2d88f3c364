"""Products of half precision whose sums are float32 on all devices that share them."""

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
    """Multiplies like `jax.lax.dot_general`, adds up in float32, and rounds the sum to the inputs' dtype.

    One GPU does that by itself. Where the contracted dimension is sharded over devices, as in the second of a pair of
    tensor-parallel dense layers, jax adds the devices' shares in the dtype of the product, in float16 from 65504 on
    to infinity; here, and in the gradients, in float32. For `flax.linen.Dense(dot_general=...)` and the like.

    Args:
      lhs: floating array.
      rhs: floating array of the same dtype.
      dimension_numbers: ((contracting of lhs, of rhs), (batch of lhs, of rhs)), as `dot_general` takes them; no batch
        dimensions.
      precision: as for `dot_general`.
      preferred_element_type: the result's dtype; None for that of the inputs.
      **unused: what layers pass to `dot_general` beyond that; it has to be None.

    Returns:
      The product.

    Raises:
      ValueError: there are batch dimensions, or another argument that is not None.

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
    # Within autocast its rules would give the product itself the half type that is for its operands.
    product = opaque_to_autocast(functools.partial(_product, contract, precision))
    result: Any = product(_as_operand(lhs), _as_operand(rhs))
    return result if preferred_element_type is None else result.astype(preferred_element_type)


@autocast_as("lower")
def _as_operand(x: jax.Array) -> jax.Array:
    return x * jnp.ones((), x.dtype)  # an operation, for autocast to cast; XLA leaves it out


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
