"""Operations on node features, stored in half precision: products with weights, biases, activations, dropout."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from flax import nnx

from jmp_train.graphs.array_types import Floats
from jmp_train.graphs.layers.aggregation import aggregate
from jmp_train.graphs.structure import SparseFeatures, graph_storage, upcast
from jmp_train.policies import autocast_as
from jmp_train.policies.pytrees import check_number

Activation = Callable[[jax.Array], jax.Array]

Data = TypeVar("Data", jax.Array, SparseFeatures)


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


def checked_eps(eps: Floats) -> jax.Array:
    """Returns a factor's difference from 1 as an array []; raises ValueError if it is not a number."""
    array = jnp.asarray(eps)
    if array.size != 1:
        raise ValueError(f"eps must be a number, got shape {array.shape}")
    return array.reshape(())


def check_dropout(name: str, rate: float, key: jax.Array | nnx.Rngs | None) -> None:
    """Raises ValueError if a rate is not in [0, 1), or has no key."""
    check_number(name, rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{name}={rate} must be in [0, 1)")
    if rate and key is None:
        raise ValueError(f"{name}={rate} needs a random key")


def drop(data: Data, rate: float, key: jax.Array | None) -> Data:
    """Returns data with entries dropped, and the others scaled up."""
    if not rate or key is None:
        return data
    if isinstance(data, SparseFeatures):  # dropout leaves zeros at 0
        return data.map_values(lambda values: drop(values, rate, key))
    is_kept = jax.random.bernoulli(key, 1 - rate, data.shape)
    return jnp.where(is_kept, data / jnp.asarray(1 - rate, data.dtype), jnp.zeros_like(data))


def split_key(key: jax.Array | None) -> tuple[jax.Array | None, jax.Array | None]:
    """Returns two keys from one, or None twice without a key."""
    if key is None:
        return None, None
    first, second = jax.random.split(key)
    return first, second
