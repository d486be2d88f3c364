"""One step of an optimizer on parameters in float32, taken or skipped."""

from typing import Any

import optax

from jmp_train.policies.casting import widen_to_float32
from jmp_train.policies.finite import select_tree
from jmp_train.policies.loss_scaled_optimizer import LossScaledOptimizer


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
    if not isinstance(inner, LossScaledOptimizer):
        updates, inner_state = inner.update(grads, inner_state, wide_params, **extra_args)
        return optax.apply_updates(wide_params, updates), inner_state
    updates, inner_state = inner.propose(grads, inner_state, wide_params, **extra_args)
    new_params = optax.apply_updates(wide_params, updates)
    return select_tree(inner_state.last_finite, new_params, wide_params), inner_state
