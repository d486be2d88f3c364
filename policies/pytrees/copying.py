"""Copies of arrays that replace others."""

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.typing import ArrayLike


def copy_like(x: ArrayLike, like: jax.Array) -> jax.Array:
    """Returns a copy of an array in the dtype of another, and on its devices if it is committed.

    Args:
      x: array or number.
      like: array; only the dtype of a traced one is known.

    Example:
      >>> import jax.numpy as jnp
      >>> copy_like(2, jnp.zeros((), jnp.float16))
      Array(2., dtype=float16)
    """
    x = jnp.array(x, like.dtype)
    on_devices = isinstance(like, jax.Array) and not isinstance(like, Tracer)
    return jax.device_put(x, like.sharding) if on_devices and like.committed else x
