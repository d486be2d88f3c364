"""Dense operations on node features: products with weights, biases and activations, stored in half precision."""

from collections.abc import Callable

import jax

from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.structure import SparseFeatures, graph_storage, upcast
from jmp_train.policies.autocasting import autocast_as

Activation = Callable[[jax.Array], jax.Array]


def dense(features: jax.Array, weight: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """Returns features [nodes, in] times weights [in, out], plus a bias [out], all in one dtype."""
    return with_bias(product(features, weight), bias)


def product(features: jax.Array | SparseFeatures, weight: jax.Array) -> jax.Array:
    """Returns features [nodes, in] times weights [in, out]; for sparse features, reads only the stored entries."""
    if isinstance(features, SparseFeatures):
        return aggregate(features.connections, weight, features.values)
    return _dense_product(features, weight)


@jax.checkpoint
def _dense_product(features: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns features [nodes, in] times weights [in, out].

    The checkpoint recomputes nothing. If a width is not a multiple of 8, XLA copies half features to
    padded arrays for the GPU's matrix units, and would otherwise store the copy for the gradient.
    """
    return features @ weight


def with_bias(features: jax.Array, bias: jax.Array | None) -> jax.Array:
    """Returns the result of `add_bias`; the features if there is no bias."""
    return features if bias is None else add_bias(features, bias)


@autocast_as("lower")
def add_bias(features: jax.Array, bias: jax.Array) -> jax.Array:
    """Returns features [nodes, out] plus a bias [out], whose gradient is summed in float32.

    In half precision, a sum over the nodes stagnates; the sum of two terms is the same in both.
    """
    return (upcast(features) + upcast(bias)).astype(features.dtype)


def activated(features: jax.Array, *functions: Activation | None) -> jax.Array:
    """Applies functions, one after the other, to features; autocast stores the result in half precision."""
    for function in functions:
        if function is not None:
            features = function(features)
    return graph_storage(features)
