"""Delayed scaling in a train step: its state, which goes along with the model state, and how it comes to be."""

import jax
from jax import lax

from jmp_train.policies.autocasting import (
    DelayedScaling,
    Fp8State,
    after_step,
    scales_of,
    with_magnitudes,
)
from jmp_train.policies.dtype_policies import AutocastPolicy, PathPolicy, Policy
from jmp_train.policies.loss_scaling import LossScales, PerLossScale
from jmp_train.steps.gradients import ScalesFor
from jmp_train.types import ModelState


def delayed_scaling(policy: Policy | PathPolicy | None) -> DelayedScaling | None:
    """Returns the recipe of a policy whose products in 8 bits have delayed scaling, else None."""
    default = None if policy is None else policy.default
    recipe = default.fp8 if isinstance(default, AutocastPolicy) else None
    return recipe if isinstance(recipe, DelayedScaling) else None


def own_state(model_state: ModelState) -> ModelState:
    """Returns the model's own state, without that of delayed scaling."""
    return model_state.model_state if isinstance(model_state, Fp8State) else model_state


def gradient_factor(loss_scale: LossScales, axis_names: tuple[str, ...]) -> jax.Array:
    """Returns by what cotangents are more than those of the mean loss of the whole batch.

    Args:
      loss_scale: that the loss is multiplied with.
      axis_names: mesh axes along which the batch is split: each device takes the mean of its own part.

    Raises:
      TypeError: there are several losses with a scale each.
    """
    if isinstance(loss_scale, PerLossScale):
        raise TypeError("DelayedScaling has one history for the gradients of a product, and takes no PerLossScale")
    count = lax.axis_size(axis_names) if axis_names else 1
    return jax.numpy.asarray(loss_scale.loss_scale, jax.numpy.float32) * count


def scales_for(model_state: ModelState, loss_scale: LossScales, axis_names: tuple[str, ...]) -> ScalesFor:
    """Returns a function that makes the scales of a program's products of those in a model state.

    Args:
      model_state: of the train state.
      loss_scale: see `gradient_factor`.
      axis_names: likewise.
    """

    def make(extents: dict[str, tuple[int, ...]]) -> dict[str, jax.Array]:
        if not extents:
            return {}
        if not isinstance(model_state, Fp8State):
            raise ValueError(
                f"the policy's DelayedScaling keeps scales and histories of {len(extents)} products, which the state "
                "has not: state = jt.with_fp8_state(step, state, batch) before the first step"
            )
        return scales_of(model_state, extents, gradient_factor(loss_scale, axis_names))

    return make


def next_state(
    before: ModelState,
    own: ModelState,
    magnitudes: dict[str, jax.Array],
    loss_scale: LossScales,
    axis_names: tuple[str, ...],
) -> ModelState:
    """Returns the model state after a micro-batch.

    Args:
      before: the model state before it.
      own: the model's own state after it.
      magnitudes: that the products have seen; empty where there is no delayed scaling.
      loss_scale: see `gradient_factor`.
      axis_names: likewise.
    """
    if not isinstance(before, Fp8State):
        return own
    if not magnitudes:
        return before._replace(model_state=own)
    return with_magnitudes(before, magnitudes, gradient_factor(loss_scale, axis_names), own)


def state_after_step(model_state: ModelState, policy: Policy | PathPolicy | None) -> ModelState:
    """Returns the model state after all micro-batches, on all devices, with new scales and histories if it has any."""
    recipe = delayed_scaling(policy)
    if recipe is None or not isinstance(model_state, Fp8State):
        return model_state
    return after_step(model_state, recipe)
