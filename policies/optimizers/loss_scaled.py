"""The loss scale inside the optax state: unscale, check for overflow, step or skip, adapt; and a count of zeros.

The wrapped optimizer works in float32 for all dtypes of gradients and parameters, so that its
moments neither overflow nor stagnate. It gets unscaled and finite gradients: clipping, weight decay
and schedules belong inside, and `with_loss_scale` belongs outermost.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.loss_scaling import LossScales, check_loss_scales, unscale_and_check
from jmp_train.policies.optimizers.loss_scaled_state import (
    LossScaledState,
    SkipRule,
    SkipRuleState,
    judged,
    scaled_states,
)
from jmp_train.policies.optimizers.stochastic_rounding import StochasticRoundingState
from jmp_train.policies.optimizers.stored_parameters import (
    Addition,
    ParamsOptimizer,
    StoringOptimizer,
    add_updates,
    as_transformation,
    noting_scaled,
)
from jmp_train.policies.pytrees import find_nodes, refuse_overwritten, select_tree, upcast_to_float32
from jmp_train.policies.types import Grads, Params, PyTree


def with_loss_scale(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScales,
    *,
    skip: SkipRule[Any] | None = None,
) -> ParamsOptimizer:
    """Returns an optimizer that takes scaled gradients, skips non-finite ones and adapts the scale.

    `update(updates, state, params, *, axis_names=(), **extra_args)` upcasts the scaled gradients to
    float32, divides them by the scale of their forward pass, checks them on all devices of
    `axis_names`, and steps or skips. A skip returns updates of minus zero, which `apply_updates`
    adds without changing a bit, and keeps `inner_state`. The extra arguments are passed to the
    optimizer unchanged, except `grad`, which line searches take: it becomes the unscaled gradients.
    `return_params=True` returns the parameters instead of the updates, even for a skipped step. A train
    step can then select by `state.last_taken`, together with its other results.

    Args:
      optimizer: any optax optimizer. It gets float32 gradients and parameters.
      loss_scale: the initial scale. `NoOpLossScale()` skips without scaling, as is right for
        bfloat16. A `PerLossScale` has one for each loss, and `update` takes a tuple of gradients.
      skip: a rule that also skips steps with finite gradients, such as `spikes()`. It gets the norm of the unscaled
        gradients before the optimizer clips them, the same on all devices of `axis_names` (if these hold parts of
        the gradients, the root of the mean of their squared norms). For the loss scale, such a step counts as any
        step with finite gradients: the scale does not decrease, and one step less remains until it grows. None for no
        rule.

    Returns:
      An optimizer whose state is a `LossScaledState`; with `skip`, its `inner_state` is a `SkipRuleState`.

    Raises:
      TypeError: an argument is of another type; at `init`, parameters have flax's fp8 scales among them, which are not
        parameters; the message names it.
      ValueError: a static scale is not finite and above 0; at `init`, the optimizer has a loss scale already, or rounds
        stochastically; when called, the state was created with a skip rule and there is none now, or vice versa.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale
      >>> optimizer = with_loss_scale(optax.sgd(1.0), StaticLossScale(8.0))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.array([8.0, 16.0])}, state, params)
      >>> optax.apply_updates(params, updates)["w"]
      Array([ 0., -1.], dtype=float32)
      >>> updates, state = optimizer.update({"w": jnp.array([8.0, jnp.inf])}, state, params)
      >>> int(state.skipped_steps), bool(state.last_finite)
      (1, False)

    Reference: `torch.amp.GradScaler.step` and `update`; `optax.apply_if_finite`.
    """
    inner = as_transformation(optimizer)
    if isinstance(inner, StoringOptimizer):
        raise TypeError(
            "optimizer must not store the parameters; put with_master_weights and with_stochastic_rounding outside: "
            "with_master_weights(with_loss_scale(optimizer, loss_scale))"
        )
    if not isinstance(skip, SkipRule | None):
        raise TypeError(f"skip must be a SkipRule, such as spikes(), or None, got {skip!r}")
    check_loss_scales(loss_scale, "for a number pass StaticLossScale(number) or torch_loss_scale(init_scale=number)")

    def init(params: Params) -> Any:
        refuse_overwritten(params)
        inner_state = inner.init(upcast_to_float32(params))
        _refuse_nesting(inner_state)
        return LossScaledState(
            loss_scale=jax.tree_util.tree_map(jnp.array, loss_scale),
            inner_state=with_rule_state(skip, inner_state),
            last_finite=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
        )

    def update(
        updates: Grads,
        state: Any,
        params: Any = None,
        *,
        axis_names: Sequence[str] = (),
        return_params: bool = False,
        on_addition: Callable[[Addition], None] | None = None,
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        grads, finite, next_scale = unscale_and_check(state.loss_scale, upcast_to_float32(updates), axis_names)
        if "grad" in extra_args:  # a line search compares it with the loss
            extra_args = {**extra_args, "grad": grads}
        old_inner_state = wrapped_state(skip, state.inner_state)
        new_updates, new_inner_state = inner.update(grads, old_inner_state, upcast_to_float32(params), **extra_args)
        rule_state = None if skip is None else judged(skip, grads, finite, state.inner_state, axis_names)
        taken = finite if rule_state is None else finite & ~rule_state.last_skipped
        skipped = (~taken).astype(jnp.int32)
        inner_state = select_tree(taken, new_inner_state, old_inner_state)
        new_state = LossScaledState(
            loss_scale=next_scale,
            inner_state=inner_state if rule_state is None else rule_state._replace(inner_state=inner_state),
            last_finite=finite,
            skipped_steps=state.skipped_steps + skipped,
            consecutive_skips=(state.consecutive_skips + 1) * skipped,
        )
        if return_params:
            return add_updates(params, new_updates, on_addition), new_state
        # x + -0.0 is x for every x; 0.0 would turn a parameter of -0.0 into 0.0. Complex numbers have two signs.
        return jax.tree_util.tree_map(lambda u: jnp.where(taken, u, -jnp.zeros_like(u)), new_updates), new_state

    return ParamsOptimizer(init, noting_scaled(update))


def _refuse_nesting(inner_state: Any) -> None:
    """Raises ValueError if the state of the wrapped optimizer shows one that does not belong inside."""
    if scaled_states(inner_state):
        raise ValueError("optimizer already has a loss scale; call with_loss_scale once")
    if find_nodes(inner_state, StochasticRoundingState):
        raise ValueError(
            "with_stochastic_rounding has no effect inside with_loss_scale, where parameters are float32; "
            "put it outside"
        )


class ZeroGradientsState(NamedTuple):
    """State of `count_zero_gradients`.

    Attributes:
      zeros: int32 scalar, number of zero elements in the gradients of the last step taken.
      inner_state: the wrapped optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> int(count_zero_gradients(optax.sgd(0.1)).init(jnp.ones(2)).zeros)
      0
    """

    zeros: jax.Array
    inner_state: Any


def count_zero_gradients(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that counts the zeros in its gradients.

    Inside of `with_loss_scale` these are unscaled and float32, and `train_step` reports the count among its
    metrics as `num_zeros_in_grad`. A skipped step counts nothing and keeps the last number.

    Args:
      optimizer: any optax optimizer.

    Returns:
      An optimizer whose state is a `ZeroGradientsState`.

    Raises:
      TypeError: `optimizer` is not an optax optimizer.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = count_zero_gradients(optax.sgd(0.1))
      >>> params = jnp.ones(3)
      >>> _, state = optimizer.update(jnp.array([0.0, 1.0, 0.0]), optimizer.init(params), params)
      >>> int(state.zeros)
      2

    Reference: `log_num_zeros_in_grad` of Megatron-LM and ColossalAI.
    """
    inner = as_transformation(optimizer)

    def init(params: Params) -> ZeroGradientsState:
        return ZeroGradientsState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: Grads, state: Any, params: Params | None = None, **extra_args: object
    ) -> tuple[Any, ZeroGradientsState]:
        counts = [(g == 0).sum(dtype=jnp.int32) for g in jax.tree_util.tree_leaves(updates)]
        zeros = functools.reduce(jnp.add, counts, jnp.int32(0))
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return new_updates, ZeroGradientsState(zeros, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def with_rule_state(rule: SkipRule[Any] | None, inner_state: PyTree) -> Any:
    """Returns the wrapped optimizer's first state, with the rule's around it if there is one."""
    if rule is None:
        return inner_state
    return SkipRuleState(inner_state, jax.tree_util.tree_map(jnp.array, rule.init()), jnp.array(False))


def wrapped_state(rule: SkipRule[Any] | None, inner_state: Any) -> Any:
    """Returns the wrapped optimizer's state; raises ValueError if it has a rule's state but no rule, or vice versa."""
    if isinstance(inner_state, SkipRuleState) != (rule is not None):
        has, wants = ("no", "has one") if rule is not None else ("a", "has none")
        raise ValueError(
            f"skip must be the same as at init: state has {has} skip rule's state, but with_loss_scale {wants}; to "
            "change it, call adopt_opt_state(optimizer.init(params), state)"
        )
    return inner_state.inner_state if rule is not None else inner_state
