"""One step of an optimizer on parameters in float32, taken or skipped."""

from typing import Any

import optax

from jmp_train.policies.casting import widen_to_float32
from jmp_train.policies.finite import select_tree
from jmp_train.policies.loss_scaled_optimizer import LossScaledOptimizer, scaled_states


def wide_step(
    inner: optax.GradientTransformationExtraArgs,
    updates: Any,
    inner_state: Any,
    wide_params: Any,
    **extra_args: Any,
) -> tuple[Any, Any]:
    """Returns what an optimizer makes of parameters in float32, and its next state.

    Where it has a loss scale and skips, the parameters come back as they were.
    """
    grads = widen_to_float32(updates)
    # What is outermost leaves the selection to us; what is nested made zeros of its updates already, but
    # others may have changed them since.
    update = inner.propose if isinstance(inner, LossScaledOptimizer) else inner.update
    updates, inner_state = update(grads, inner_state, wide_params, **extra_args)
    new_params = optax.apply_updates(wide_params, updates)
    for _, scaled in scaled_states(inner_state):
        new_params = select_tree(scaled.last_finite, new_params, wide_params)
    return new_params, inner_state
