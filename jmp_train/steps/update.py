"""`apply_gradients`: updates the train state, or skips the step."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import optax

from jmp_train.policies import Params
from jmp_train.policies.loss_scaling import unscale_and_check
from jmp_train.policies.optimizers import (
    Addition,
    Evaluate,
    extra_arguments,
    loss_scale_of,
    optimizer_step,
    scaled_states,
    taken_by_rules,
)
from jmp_train.policies.pytrees import (
    select_state_leaf,
    select_tree,
    stays_finite,
    trained,
    trained_gradients,
    with_overwritten,
)
from jmp_train.steps.gradient_functions import GradientFunction, StepGradients
from jmp_train.steps.train_state import TrainState
from jmp_train.types import Batch


class Update(NamedTuple):
    """The result of `apply_gradients`.

    Attributes:
      state: the next train state.
      grads: unscaled gradients; the sum over several losses.
      finite: bool scalar, True if all gradients are finite, on all devices.
      taken: bool scalar, True if the optimizer took the step.
      additions: one `Addition` of the optimizer to the parameters, if requested; otherwise empty.
      model_state_finite: bool scalar, False if the model state overflowed, so that the old one was kept; None without
        a loss scale, and for a model state without floating arrays.
    """

    state: TrainState
    grads: Any
    finite: jax.Array
    taken: jax.Array
    additions: tuple[Addition, ...]
    model_state_finite: jax.Array | None = None


def apply_gradients(
    optimizer: optax.GradientTransformationExtraArgs,
    state: TrainState,
    result: StepGradients,
    rng: jax.Array | None = None,
    *,
    axis_names: Sequence[str] = (),
    model_axis_names: Sequence[str] = (),
    evaluate: Evaluate | None = None,
    with_additions: bool = False,
) -> Update:
    """Returns the next train state: unscales and checks the gradients, then takes or skips the step.

    If the optimizer is a `with_loss_scale`, a step with non-finite gradients leaves parameters, inner optimizer state
    and model state bitwise unchanged. If only the model state overflows, the step is taken with the old model state.

    Args:
      optimizer: the optimizer of `state.opt_state`.
      state: the state in which the gradients were computed.
      result: the result of a gradient function, averaged over devices.
      rng: the random key of the next state, or None.
      axis_names: mesh axes whose devices take or skip the step together.
      model_axis_names: those of them over which the model state is split, so that its overflow is seen on all.
      evaluate: the result of `evaluation`, for optimizers that evaluate the loss again.
      with_additions: True to return the optimizer's addition to the parameters.

    Example:
      >>> import jax.numpy as jnp, jmp_train as jt
      >>> from jmp_train.steps import loss_gradients
      >>> gradients = loss_gradients(jt.stateless(lambda w, x: (w * x).sum()))
      >>> state = jt.TrainState.create(jnp.ones(()), optax.sgd(0.5))
      >>> result = gradients(jt.NoOpLossScale(), state.params, None, jnp.ones(2), None)
      >>> float(apply_gradients(optax.with_extra_args_support(optax.sgd(0.5)), state, result).state.params)
      0.0
    """
    loss, model_state, _, grads = result
    # with_loss_scale computes both of these too, but XLA computes them only once.
    unscaled, finite, _ = unscale_and_check(loss_scale_of(state.opt_state), grads, axis_names)
    extra = extra_arguments(state.opt_state, loss, trained(unscaled), evaluate)
    if axis_names:
        extra["axis_names"] = tuple(axis_names)
    additions: list[Addition] = []
    on_addition = additions.append if with_additions else None
    old = trained(state.params)
    seen = trained_gradients(grads)
    params, opt_state = optimizer_step(optimizer, seen, finite, state.opt_state, old, on_addition, **extra)
    params = with_overwritten(params, unscaled)
    taken = taken_by_rules(finite, opt_state)
    state_finite = None
    if scaled_states(opt_state):
        params = select_tree(taken, params, state.params)
        state_finite = stays_finite(model_state, state.model_state, model_axis_names)
        model_state = jax.tree_util.tree_map_with_path(
            lambda path, *pair: select_state_leaf(path, taken, state_finite, *pair), model_state, state.model_state
        )
    after = TrainState(params, opt_state, model_state, rng, state.step + 1)
    return Update(after, unscaled, finite, taken, tuple(additions), state_finite)


def evaluation(gradients: GradientFunction, state: TrainState, batch: Batch, rng: jax.Array | None) -> Evaluate:
    """Returns a function from parameters to the loss and unscaled gradients of a batch.

    Args:
      gradients: the gradient function of the step.
      state: has the loss scale and the model state.
      batch: the batch of the step.
      rng: the random key of the step.
    """
    loss_scale = loss_scale_of(state.opt_state)

    def evaluate(float32_params: Params) -> tuple[jax.Array, Any]:
        params = with_overwritten(float32_params, state.params)
        params = jax.tree.map(lambda x, old: x.astype(old.dtype), params, state.params)
        result = gradients(loss_scale, params, state.model_state, batch, rng)
        unscaled = trained(unscale_and_check(loss_scale, result.grads, ()).grads)
        return result.loss, jax.tree.map(lambda g, x: g.astype(x.dtype), unscaled, float32_params)

    return evaluate
