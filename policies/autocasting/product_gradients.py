"""Computes the gradients of a matrix product: the dimensions to contract and the order of the results."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Contract = tuple[tuple[int, ...], tuple[int, ...]]  # dimensions of lhs and of rhs, in pairs


def operand_gradients(
    contract: Contract,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    for_lhs: Callable[[Contract], Any],
    for_rhs: Callable[[Contract], Any],
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of both operands of a product without batch dimensions.

    Args:
      contract: the contracted dimensions of the product. Its result has the free dimensions of lhs, then those of rhs.
      shapes: the shapes of lhs and rhs.
      for_lhs: multiplies the cotangent by rhs along the given dimensions.
      for_rhs: multiplies the cotangent by lhs along the given dimensions.
    """
    lhs_contract, rhs_contract = contract
    lhs_free, rhs_free = (_others(len(s), dims) for s, dims in zip(shapes, contract, strict=True))
    of_lhs = tuple(range(len(lhs_free)))  # dimensions of the cotangent
    of_rhs = tuple(range(len(lhs_free), len(lhs_free) + len(rhs_free)))
    return (
        _like(for_lhs((of_rhs, rhs_free)), lhs_free, lhs_contract, rhs_contract),
        _like(for_rhs((of_lhs, lhs_free)), rhs_free, rhs_contract, lhs_contract),
    )


def _others(count: int, dimensions: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(count) if i not in dimensions)


def _like(grads: Any, free: tuple[int, ...], contract: tuple[int, ...], partners: tuple[int, ...]) -> jax.Array:
    """Returns gradients with an operand's order of dimensions; they come free first, then in the partner's order."""
    order = [contract[partners.index(partner)] for partner in sorted(partners)]
    return jnp.transpose(grads, np.argsort([*free, *order]).tolist())
