"""Recognizes jax random keys among leaves."""

from typing import TypeGuard

import jax
import jax.numpy as jnp


def is_key(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is an array of typed random keys, or describes one.

    Example:
      >>> import jax
      >>> is_key(jax.random.key(0)), is_key(jax.random.PRNGKey(0)), is_key(0)
      (True, False, False)
    """
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # pyright: ignore


def is_key_or_data(x: object) -> TypeGuard[jax.Array]:
    """Returns whether `x` is an array of random keys, typed or as uint32 data.

    Example:
      >>> import jax
      >>> is_key_or_data(jax.random.key(0)), is_key_or_data(jax.random.PRNGKey(0)), is_key_or_data(0)
      (True, True, False)
    """
    return is_key(x) or getattr(x, "dtype", None) == jnp.uint32
