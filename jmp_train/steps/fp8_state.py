"""`with_fp8_state`: adds the scales of delayed scaling to a train state before the first step."""

import dataclasses

import jax

from jmp_train.policies.autocasting import fp8_state
from jmp_train.policies.dtype_policies import FirstTrace
from jmp_train.policies.optimizers import loss_scale_of
from jmp_train.steps.call_checks import check_is_train_state
from jmp_train.steps.fp8_scaling import delayed_scaling, own_state, product_extents
from jmp_train.steps.gradient_functions import accumulated
from jmp_train.steps.step import TrainStep
from jmp_train.steps.step_losses import loss_gradients
from jmp_train.steps.train_state import TrainState
from jmp_train.types import Batch


def with_fp8_state(step: TrainStep, state: TrainState, batch: Batch) -> TrainState:
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
      >>> import dataclasses, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> rules = jt.TORCH_CUDA.replace(primitives={"dot_general": "fp8"})
      >>> policy = dataclasses.replace(jt.get_policy("autocast_bfloat16"), rules=rules, fp8=jt.DelayedScaling())
      >>> step = jt.train_step(jt.stateless(lambda w, x: (x @ w).mean()), optax.sgd(0.1), policy=policy)
      >>> batch = jnp.ones((4, 8))
      >>> state = jt.steps.with_fp8_state(step, jt.TrainState.create(jnp.ones((8, 2)), optax.sgd(0.1)), batch)
      >>> state, metrics = step(state, batch)
      >>> state.model_state.fp8.value.amax_history["dot_general"][:, 0]
      Array([1.   , 1.   , 0.125], dtype=float32)
    """
    if not isinstance(step, TrainStep):
        raise TypeError(f"step must be a result of train_step, not jitted, got {type(step).__name__}")
    check_is_train_state(state)
    recipe = delayed_scaling(step.policy)
    if recipe is None:
        raise ValueError(f"the step's policy must be an AutocastPolicy with fp8=DelayedScaling(), got {step.policy!r}")
    places = _places(step, state, batch)
    if not places:
        raise ValueError(
            "no product of the loss is in 8 bits by the rules of the step's policy; check with explain_autocast"
        )
    return dataclasses.replace(state, model_state=fp8_state(places, recipe, own_state(state.model_state)))


def _places(step: TrainStep, state: TrainState, batch: Batch) -> list[str]:
    """Returns the places of a step's fp8 products, without computing them."""
    gradients = loss_gradients(step.loss_fn, step.policy, first_trace=FirstTrace.past())
    gradients, found = accumulated(gradients, step.accumulate_steps), {}

    def note(state: TrainState, batch: Batch) -> None:
        loss_scale, own = loss_scale_of(state.opt_state), own_state(state.model_state)
        found.update(product_extents(gradients, loss_scale, state.params, own, batch, state.rng))

    jax.eval_shape(note, state, batch)
    return list(found)
