"""Initializers of layers' parameters that flax does not have."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


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
