"""`over_axes`: averages the gradients of a batch over mesh axes; each device draws from random keys of its own."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.typing import DTypeLike

from jmp_train.policies import Params
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.policies.pytrees import is_inexact_array, is_key, mean_over_axes, pvary, reduce_gradients, sum_over_axes
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients
from jmp_train.steps.step_checks import check_local_loss
from jmp_train.types import Batch, ModelState


def over_axes(
    gradients: GradientFunction, axis_names: Sequence[str], reduce_dtype: DTypeLike = jnp.float32
) -> GradientFunction:
    """Returns a gradient function that averages over all devices, for use inside a `shard_map` or `pmap`.

    Args:
      gradients: gradient function of the examples of one device.
      axis_names: mesh axes over which the batch is split; none returns `gradients`.
      reduce_dtype: dtype of the reduction of gradients; see `reduce_gradients`. Loss, model state and `aux` are
        averaged in float32. Arrays that are neither floating nor complex stay those of each device.

    Example:
      >>> import jmp_train as jt
      >>> from jmp_train.steps import loss_gradients
      >>> gradients = over_axes(loss_gradients(jt.stateless(lambda w, x: w * x)), ("data",))
      >>> of_device = lambda x: gradients(jt.NoOpLossScale(), jnp.ones(()), None, x, None).grads
      >>> jax.vmap(of_device, axis_name="data")(jnp.array([1.0, 3.0]))
      Array([2., 2.], dtype=float32)
    """
    return averaged(on_device(gradients, axis_names), axis_names, reduce_dtype)


def on_device(gradients: GradientFunction, axis_names: Sequence[str]) -> GradientFunction:
    """Returns a gradient function with different random keys on each device and local gradients.

    Args:
      gradients: gradient function of the examples of one device.
      axis_names: mesh axes over which the batch is split; none returns `gradients`.
    """
    if not axis_names:
        return gradients
    names = tuple(axis_names)

    def of_device(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        if rng is not None:
            rng = jax.random.fold_in(rng, lax.axis_index(names))
        params = pvary(params, names)
        # Marked as varying over devices, because the loss function may compute them from its examples.
        own = jax.tree.map(lambda x: pvary(x, names) if is_inexact_array(x) or is_key(x) else x, model_state)
        result = gradients(loss_scale, params, keys_of_device(own, names), batch, rng)
        check_local_loss(result.loss, params, names)
        return result._replace(model_state=keys_of_first(result.model_state, names))

    return of_device


def averaged(gradients: GradientFunction, axis_names: Sequence[str], reduce_dtype: DTypeLike) -> GradientFunction:
    """Returns a gradient function whose results are averaged over devices.

    Args:
      gradients: gradient function with local gradients, from `on_device`.
      axis_names: mesh axes; none returns `gradients`.
      reduce_dtype: see `over_axes`.
    """
    if not axis_names:
        return gradients

    def over_devices(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        loss, model_state, aux, grads = gradients(loss_scale, params, model_state, batch, rng)
        grads = reduce_gradients(grads, axis_names, reduce_dtype)
        return StepGradients(*mean_over_axes((loss, model_state, aux), axis_names), grads)

    return over_devices


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
