"""Initializers of layers' parameters that flax does not have."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike


def uniform_between(bound: float) -> nnx.Initializer:
    """Returns the initializer that draws uniformly between -bound and bound, as torch's layers do."""

    def init(key: jax.Array, shape: Sequence[int], dtype: DTypeLike = jnp.float32, *_: Any) -> jax.Array:
        return jax.random.uniform(key, shape, dtype, -bound, bound)

    return init


def uniform_param(rngs: nnx.Rngs, shape: tuple[int, ...], fan_in: int, dtype: DTypeLike) -> nnx.Param[jax.Array]:
    """Returns a parameter drawn as those of `torch.nn.Linear`, between -1 and 1 over the square root of `fan_in`.

    Args:
      rngs: flax's random streams, of which "params" is used.
      shape: of a weight or a bias.
      fan_in: how many inputs the layer has.
      dtype: the parameter's.
    """
    return nnx.Param(uniform_between(max(fan_in, 1) ** -0.5)(rngs.params(), shape, dtype))
