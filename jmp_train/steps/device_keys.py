"""Random keys in the model state, such as those of nnx's dropout: each device draws from its own key."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree

from jmp_train.policies.pytrees import is_key, sum_over_axes
from jmp_train.types import ModelState


def keys_of_device(model_state: ModelState, axis_names: Sequence[str]) -> Any:
    """Returns the model state with different random keys on each device; the first device keeps its own.

    Args:
      model_state: the same on all devices. Untyped keys stay, because they cannot be told from counts.
      axis_names: mesh axes over which the batch is split; none changes nothing.
    """
    if not axis_names:
        return model_state
    index = lax.axis_index(tuple(axis_names))

    def of_device(key: jax.Array) -> jax.Array:
        folded = jax.vmap(lambda key: jax.random.fold_in(key, index))(key.reshape(-1)).reshape(key.shape)
        return jnp.where(index == 0, key, folded)

    return jax.tree.map(lambda x: of_device(x) if is_key(x) else x, model_state)


def keys_of_first(model_state: ModelState, axis_names: Sequence[str]) -> Any:
    """Returns the model state with the first device's random keys on all devices.

    Args:
      model_state: the state after a step that began with `keys_of_device`. Keys that the model only reads are
        unchanged.
      axis_names: mesh axes over which the batch is split; none changes nothing.
    """
    if not axis_names or not any(map(is_key, jax.tree.leaves(model_state))):
        return model_state
    is_first = lax.axis_index(tuple(axis_names)) == 0
    data = jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else None, model_state)
    flat, as_data = ravel_pytree(data)  # one sum for all keys
    signed = lax.bitcast_convert_type(flat, jnp.int32)  # XLA sums these and the test for overflow in one all-reduce
    total = sum_over_axes(jnp.where(is_first, signed, 0), axis_names)
    first = as_data(lax.bitcast_convert_type(total, flat.dtype))

    def with_data(x: Any, data: jax.Array | None) -> Any:
        return x if data is None else jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    return jax.tree.map(with_data, model_state, first)
