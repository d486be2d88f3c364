"""Dense operations on node features, stored in half precision, and the initializers that flax does not have."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

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


def uniform_between(bound: float) -> nnx.Initializer:
    """Returns an initializer that draws uniformly between -bound and bound, as in torch's layers."""

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32, *_: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def uniform_param(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter as in `torch.nn.Linear`, uniform between -1 and 1 over the square root of `fan_in`.

    Args:
      rngs: flax's random streams; "params" is used.
      shape: shape of a weight or a bias.
      fan_in: number of inputs of the layer.
      dtype: dtype of the parameter.
    """
    return nnx.Param(uniform_between(max(fan_in, 1) ** -0.5)(rngs.params(), shape, dtype))
