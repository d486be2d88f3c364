"""The next parameters of one step of any optimizer: as proposed, and as taken or skipped."""

from collections.abc import Callable
from typing import Any

import optax

from jmp_train.policies.optimizers.loss_scaled_state import scaled_states
from jmp_train.policies.optimizers.stored_parameters import Addition, ParamsOptimizer, add_updates
from jmp_train.policies.pytrees import select_tree
from jmp_train.policies.types import Grads, OptState, Params


def proposed_params(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    on_addition: Callable[[Addition], None] | None = None,
    **extra_args: object,
) -> tuple[Any, Any]:
    """Returns the parameters after an optimizer's step, even a skipped one, and its next state.

    Args:
      optimizer: any optimizer; a `ParamsOptimizer` computes the next parameters itself.
      grads: gradients for `optimizer.update`.
      opt_state: the optimizer's state.
      params: arrays, which keep their dtypes.
      on_addition: if given, called once with the optimizer's addition to the parameters.
      **extra_args: extra arguments of `optimizer.update`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> sgd, params = optax.sgd(0.5), jnp.ones(2)
      >>> proposed_params(sgd, jnp.ones(2), sgd.init(params), params)[0]
      Array([0.5, 0.5], dtype=float32)
    """
    if isinstance(optimizer, ParamsOptimizer):
        if on_addition is not None:
            extra_args["on_addition"] = on_addition
        return optimizer.update(grads, opt_state, params, return_params=True, **extra_args)
    updates, opt_state = optimizer.update(grads, opt_state, params, **extra_args)
    return add_updates(params, updates, on_addition), opt_state


def next_params(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    on_addition: Callable[[Addition], None] | None = None,
    **extra_args: object,
) -> tuple[Any, Any]:
    """Returns the result of `proposed_params`, but with the old parameters if the step is skipped.

    Args:
      optimizer: see `proposed_params`.
      grads: gradients, scaled if there is a loss scale.
      opt_state: a state; its loss scale, if any, decides about a skip.
      params: arrays.
      on_addition: see `proposed_params`.
      **extra_args: extra arguments of `optimizer.update`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import NoOpLossScale, with_loss_scale
      >>> optimizer, params = with_loss_scale(optax.sgd(0.5), NoOpLossScale()), jnp.ones(2)
      >>> state = optimizer.init(params)
      >>> next_params(optimizer, jnp.array([1.0, jnp.inf]), state, params)[0]
      Array([1., 1.], dtype=float32)
    """
    new_params, opt_state = proposed_params(optimizer, grads, opt_state, params, on_addition, **extra_args)
    # Nested loss scales have set their updates to zero already, but others may have changed them since.
    for _, scaled in scaled_states(opt_state):
        new_params = select_tree(scaled.last_taken, new_params, params)
    return new_params, opt_state
