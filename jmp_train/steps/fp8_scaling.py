"""Delayed scaling of fp8 products: transforms of gradient functions, and the `Fp8State` in the model state."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jmp_train.policies import AutocastPolicy, DelayedScaling, Fp8State, Params, PathPolicy
from jmp_train.policies.autocasting import DelayedScales, after_step, fp8_scales, fp8_state, scales_of, with_magnitudes
from jmp_train.policies.dtype_policies import FirstTrace, Policy
from jmp_train.policies.loss_scaling import LossScales, PerLossScale
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.steps.call_checks import check_is_train_state
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients, StepOptions, accumulated
from jmp_train.steps.gradients import ScaledProducts
from jmp_train.steps.step_losses import loss_gradients
from jmp_train.steps.train_state import TrainState
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


def with_fp8_state(step: StepOptions, state: TrainState, batch: Batch) -> TrainState:
    """Returns a train state with the scales and histories of delayed scaling next to the model's own state.

    Args:
      step: from `train_step`, with a policy whose `fp8` is `DelayedScaling`.
      state: the train state, with or without a model state.
      batch: a batch of the step. Nothing is computed, so `jax.ShapeDtypeStruct` works in place of its arrays.

    Returns:
      The state with an `Fp8State` as `model_state`. Its `model_state.model_state` is the model's own, which the loss
      function takes and returns as before.

    Raises:
      TypeError: `step` is not a `TrainStep`, or `state` no `TrainState`.
      ValueError: the policy has another recipe, or the step has no fp8 product.

    Example:
      >>> import dataclasses, jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})
      >>> policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=jt.DelayedScaling())
      >>> step = jt.train_step(jt.stateless(lambda w, x: (x @ w).mean()), optax.sgd(0.1), policy=policy)
      >>> batch = jnp.ones((4, 8))
      >>> state = jt.steps.with_fp8_state(step, jt.TrainState.create(jnp.ones((8, 2)), optax.sgd(0.1)), batch)
      >>> state, metrics = jax.jit(step)(state, batch)
      >>> state.model_state.fp8.value.amax_history["dot_general"][:, 0]
      Array([1.   , 1.   , 0.125], dtype=float32)
    """
    if not isinstance(step, StepOptions):
        raise TypeError(f"step must be a result of train_step, not jitted, got {type(step).__name__}")
    check_is_train_state(state)
    recipe = delayed_scaling(step.policy)
    if recipe is None:
        raise ValueError(f"the step's policy must be an AutocastPolicy with fp8=DelayedScaling(), got {step.policy!r}")
    places = _places(step, state, batch)
    if not places:
        raise ValueError(
            "no product of the loss is in 8 bits by the rules of the step's policy, other than in while loops and "
            "functions with custom derivatives, which have no delayed scales; check with explain_autocast"
        )
    return dataclasses.replace(state, model_state=fp8_state(places, recipe, own_state(state.model_state)))


def _places(step: StepOptions, state: TrainState, batch: Batch) -> list[str]:
    """Returns the places of a step's fp8 products, without computing them."""
    gradients = loss_gradients(step.loss_fn, step.policy, first_trace=FirstTrace.past())
    gradients, found = accumulated(gradients, step.accumulate_steps), {}

    def note(state: TrainState, batch: Batch) -> None:
        loss_scale, own = loss_scale_of(state.opt_state), own_state(state.model_state)
        found.update(product_extents(gradients, loss_scale, state.params, own, batch, state.rng))

    jax.eval_shape(note, state, batch)
    return list(found)
