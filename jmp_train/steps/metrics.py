"""The metrics of a train step."""

import jax.numpy as jnp
import optax

from jmp_train.policies.optimizers import (
    SkipRuleState,
    ZeroGradientsState,
    loss_scale_of,
    reason_of_skip,
    scaled_states,
)
from jmp_train.policies.pytrees import find_nodes, trained
from jmp_train.steps.gradient_functions import StepGradients
from jmp_train.steps.train_state import TrainState
from jmp_train.steps.update import Update
from jmp_train.steps.watches import Watching, watch_metrics
from jmp_train.types import Metrics


def step_metrics(step: Watching, state: TrainState, result: StepGradients, update: Update) -> Metrics:
    """Returns the metrics of a step; `train_step` lists them.

    Args:
      step: the step.
      state: the state before the step.
      result: the result of the gradient function.
      update: the result of `apply_gradients`.
    """
    opt_state = update.state.opt_state
    skipped = [scaled.skipped_steps for _, scaled in scaled_states(opt_state)]
    zeros = [found.zeros for _, found in find_nodes(opt_state, ZeroGradientsState)]
    has_rule = bool(find_nodes(opt_state, SkipRuleState))
    return {
        "loss": result.loss,
        "aux": result.aux,
        "grad_norm": optax.tree.norm(trained(update.grads)),
        "grads_finite": update.finite,
        "loss_scale": jnp.asarray(loss_scale_of(opt_state).loss_scale, jnp.float32),
        "skipped_steps": skipped[0] if skipped else jnp.zeros((), jnp.int32),
        **({"num_zeros_in_grad": sum(zeros)} if zeros else {}),
        **({"skip_reason": reason_of_skip(update.finite, update.taken)} if has_rule else {}),
        **watch_metrics(step, state, result.grads, update.additions, update.taken),
    }
