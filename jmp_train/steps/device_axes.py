"""`over_axes`: averages the gradients of a batch that is split over mesh axes."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies import Params
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.policies.pytrees import is_inexact_array, is_key, mean_over_axes, pvary, reduce_gradients
from jmp_train.steps.device_keys import keys_of_device, keys_of_first
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
