"""Products of layers that are polynomials of the adjacency: a weight for each term, before or after the hops."""

import jax
import jax.numpy as jnp

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.dense import product
from jmp_train.graphs.layers.layer_inputs import as_floats
from jmp_train.graphs.structure import SparseFeatures


def checked_terms(count: str, weight: Floats) -> jax.Array:
    """Returns a checked weight [terms, in, out].

    Args:
      count: meaning of its first axis, for messages.
      weight: weight of at least one term.

    Raises:
      TypeError: it is not floating.
      ValueError: it has another rank, or no terms.
    """
    kernel = as_floats("weight", weight, count, "in", "out")
    if len(kernel) == 0:
        raise ValueError(f"weight must have at least one of {count}, got shape {kernel.shape}")
    return kernel


def is_narrowing(rows: jax.Array | SparseFeatures, weight: jax.Array) -> bool:
    """Returns whether the products of rows [nodes, in] with weights [..., in, out] come before the hops.

    They do if that makes the rows of the hops narrower, and for sparse rows, which only a product turns into an array.
    """
    return isinstance(rows, SparseFeatures) or weight.shape[-2] > weight.shape[-1]


def products_apart(rows: jax.Array | SparseFeatures, weight: jax.Array) -> jax.Array:
    """Returns the products [terms, nodes, out] of rows [nodes, in] with weights [terms, in, out]."""
    terms, width, out = weight.shape
    wide = product(rows, jnp.moveaxis(weight, 0, 1).reshape(width, terms * out))
    return jnp.moveaxis(wide.reshape(-1, terms, out), 1, 0)


def product_of_all(rows: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the sum [nodes, out] of products of rows [terms, nodes, in] with weights [terms, in, out]."""
    terms, nodes, width = rows.shape
    wide = jnp.moveaxis(rows, 0, 1).reshape(nodes, terms * width)
    return product(wide, weight.reshape(terms * width, -1))
