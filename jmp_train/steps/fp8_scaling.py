"""Delayed scaling of fp8 products, by transforms of gradient functions that keep an `Fp8State` as model state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies import Params
from jmp_train.policies.autocasting import (
    DelayedScales,
    DelayedScaling,
    Fp8State,
    after_step,
    fp8_scales,
    scales_of,
    with_magnitudes,
)
from jmp_train.policies.dtype_policies import AutocastPolicy, PathPolicy, Policy
from jmp_train.policies.loss_scaling import LossScales, PerLossScale
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients
from jmp_train.steps.gradients import ScaledProducts
from jmp_train.types import Batch, ModelState


def delayed_scaling(policy: Policy | PathPolicy | None) -> DelayedScaling | None:
    """Returns a policy's recipe of delayed scaling; None if its fp8 products have no delayed scaling."""
    default = None if policy is None else policy.default
    recipe = default.fp8 if isinstance(default, AutocastPolicy) else None
    return recipe if isinstance(recipe, DelayedScaling) else None


def own_state(model_state: ModelState) -> ModelState:
    """Returns the model's own state, without scales and histories."""
    return model_state.model_state if isinstance(model_state, Fp8State) else model_state


def scaled_products(
    gradients: GradientFunction, recipe: DelayedScaling | None, axis_names: Sequence[str] = ()
) -> GradientFunction:
    """Returns a gradient function whose fp8 products take their scales from the model state.

    Args:
      gradients: gradient function from `loss_gradients`; its loss function gets the model's own state.
      recipe: None if the policy has no delayed scaling; an `Fp8State` is then passed on unchanged.
      axis_names: mesh axes over which the batch is split: each device differentiates the mean over its own part.

    Raises:
      ValueError: when called, the model state has no scales for these products; see `with_fp8_state`.
      TypeError: when called with a `PerLossScale`, because a product has only one history for its gradients.
    """

    def with_scales(
        loss_scale: LossScales, params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> StepGradients:
        own = own_state(model_state)
        extents = {} if recipe is None else product_extents(gradients, loss_scale, params, own, batch, rng)
        if not extents:
            result = gradients(loss_scale, params, own, batch, rng)
            if isinstance(model_state, Fp8State):
                return result._replace(model_state=model_state._replace(model_state=result.model_state))
            return result
        if not isinstance(model_state, Fp8State):
            raise ValueError(
                f"the policy's DelayedScaling needs scales and histories of {len(extents)} products, which the "
                "state does not have; call state = jt.steps.with_fp8_state(step, state, batch) before the first step"
            )
        factor = _gradient_factor(loss_scale, axis_names)
        scaled = ScaledProducts(params, scales_of(model_state, extents, factor))
        result = gradients(loss_scale, scaled, own, batch, rng)
        grads, magnitudes = result.grads
        fp8_state = with_magnitudes(model_state, magnitudes, factor, result.model_state)
        return result._replace(model_state=fp8_state, grads=grads)

    return with_scales


def with_next_scales(gradients: GradientFunction, recipe: DelayedScaling | None) -> GradientFunction:
    """Returns a gradient function whose model state has the scales of the next step.

    Args:
      gradients: gradient function of all micro-batches and devices.
      recipe: see `scaled_products`.
    """
    if recipe is None:
        return gradients

    def with_state(*call: Any) -> StepGradients:
        result = gradients(*call)
        state = result.model_state
        return result._replace(model_state=after_step(state, recipe)) if isinstance(state, Fp8State) else result

    return with_state


def product_extents(
    gradients: GradientFunction,
    loss_scale: LossScales,
    params: Params,
    model_state: ModelState,
    batch: Batch,
    rng: jax.Array | None,
) -> dict[str, tuple[int, ...]]:
    """Returns the places of the fp8 products of a gradient function, with the lengths of the loops around each."""
    found: dict[str, tuple[int, ...]] = {}
    with fp8_scales(DelayedScales({}, found)):
        jax.eval_shape(lambda: gradients(loss_scale, params, model_state, batch, rng))
    return found


def _gradient_factor(loss_scale: LossScales, axis_names: Sequence[str]) -> jax.Array:
    """Returns the factor between the cotangents and those of the mean loss of the whole batch."""
    if isinstance(loss_scale, PerLossScale):
        raise TypeError(
            "DelayedScaling has one history for the gradients of a product and does not support PerLossScale"
        )
    count = lax.axis_size(tuple(axis_names)) if axis_names else 1
    return jnp.asarray(loss_scale.loss_scale, jnp.float32) * count
