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
