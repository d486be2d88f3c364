"""Half in memory, float32 in computation: the two moves between them."""

import jax
import jax.numpy as jnp


def wide(data: jax.Array) -> jax.Array:
    """Returns floats at least in float32, all else as it is."""
    is_narrow = jnp.issubdtype(data.dtype, jnp.floating) and data.dtype.itemsize < 4
    return data.astype(jnp.float32) if is_narrow else data


@jax.jit
def graph_storage(data: jax.Array) -> jax.Array:
    """Returns the same array, which autocast keeps in half: its tables know this function's name."""
    return jnp.copy(data)
