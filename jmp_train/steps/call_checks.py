"""Checks of the arguments of a train step, made once per trace before anything is computed.

Each check is a function of a `StepCall` in the list `CHECKS`. Add new checks there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies import KahanState, LossScaledState, MasterWeightsState, OptState, Params, StateDtypesState
from jmp_train.policies.loss_scaling import PerLossScale, is_loss_scale
from jmp_train.policies.optimizers import (
    SkipRuleState,
    StochasticRoundingState,
    check_nesting,
    extra_arguments,
    loss_scale_of,
    scaled_states,
)
from jmp_train.policies.pytrees import (
    at_least_float32,
    find_nodes,
    is_float_array,
    named_leaves,
    path_name,
    trained,
)
from jmp_train.steps.gradient_functions import StepOptions
from jmp_train.steps.train_state import TrainState
from jmp_train.types import Batch


class StepCall(NamedTuple):
    """A call of a train step.

    Attributes:
      step: the step.
      state: its first argument, a `TrainState`.
      batch: its second argument.
    """

    step: StepOptions
    state: TrainState
    batch: Batch


def check_call(step: StepOptions, state: TrainState, batch: Batch) -> None:
    """Raises or warns if a step would compute something else than its user expects.

    Args:
      step: the step.
      state: a `TrainState`; other types raise TypeError.
      batch: the batch.
    """
    check_is_train_state(state)
    for check in CHECKS:
        check(StepCall(step, state, batch))


def warn_of_collapsed_values(call: StepCall) -> None:
    """Warns if different values of the batch become equal when cast. Traced arrays are not checked."""
    call.step.first_trace.look_at_values({"batch": call.batch}, call.step.policy)


def refuse_low_precision_params(call: StepCall) -> None:
    """Raises ValueError with the names of parameters stored in a lower precision than their policy's."""
    policy = call.step.policy
    if policy is None:
        return
    too_low = [
        f"{path!r} is {x.dtype.name}, not {jnp.dtype(wanted).name}"
        for path, x in named_leaves(call.state.params)
        if is_float_array(x) and jnp.finfo(x.dtype).bits < jnp.finfo(wanted := policy.policy_of(path).param_dtype).bits
    ]
    if too_low:
        raise ValueError(
            "parameters are stored in a lower precision than the policy's param_dtype; call "
            "policy.cast_to_param before TrainState.create:\n  " + "\n  ".join(too_low)
        )


def refuse_other_optimizer(call: StepCall) -> None:
    """Raises ValueError if the optimizer state belongs to another optimizer."""
    check_same_optimizer(call.step.optimizer, call.state.opt_state, trained(call.state.params))


def refuse_wrong_nesting(call: StepCall) -> None:
    """Raises ValueError if the optimizer's wrappers are nested in an order that changes the result."""
    step, state = call.step, call.state
    params = trained(state.params)
    grads = jax.tree.map(lambda x: _zeros(x.shape, at_least_float32(x.dtype)), params)
    losses = loss_scale_of(state.opt_state)
    updates = (grads,) * len(losses.loss_scales) if isinstance(losses, PerLossScale) else grads
    evaluate = None if step.all_axes else lambda params: (_zeros((), np.float32), params)
    extra = extra_arguments(state.opt_state, _zeros((), np.float32), grads, evaluate)
    if step.all_axes:
        extra["axis_names"] = step.all_axes
    check_nesting(step.optimizer, updates, state.opt_state, params, **extra)


def warn_of_missing_loss_scale(call: StepCall) -> None:
    """Warns if the policy computes in float16 and the optimizer has no loss scale."""
    if not scaled_states(call.state.opt_state):
        call.step.first_trace.miss_loss_scale(call.step.policy)


CHECKS: tuple[Callable[[StepCall], None], ...] = (
    warn_of_collapsed_values,
    refuse_low_precision_params,
    refuse_other_optimizer,
    refuse_wrong_nesting,
    warn_of_missing_loss_scale,
)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an array that stands for a gradient of this shape and dtype, and takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)


_WRAPPERS = {
    "a loss scale": LossScaledState,
    "a skip rule": SkipRuleState,
    "master weights": MasterWeightsState,
    "stochastic rounding": StochasticRoundingState,
    "Kahan compensations": KahanState,
    "dtypes of its own for the optimizer's state": StateDtypesState,
}


def check_not_replicated(state: Any) -> None:
    """Raises ValueError for a state that was replicated along a first axis, as for pmap.

    Args:
      state: a `TrainState`; other types raise TypeError.
    """
    check_is_train_state(state)
    if shape := jnp.shape(state.step):
        raise ValueError(
            f"state.step must be a scalar, got shape {shape}: the state is replicated along a first axis, as by "
            "flax.jax_utils.replicate. Pass the state as on one device (flax.jax_utils.unreplicate), and the "
            "whole batch, [examples, ...]"
        )


def check_same_optimizer(optimizer: optax.GradientTransformation, opt_state: OptState, params: Params) -> None:
    """Raises ValueError with the difference if an optimizer state belongs to another optimizer.

    Args:
      optimizer: the optimizer of the step.
      opt_state: the state passed to the step. Its loss scale may be of another kind, because the state has the rule.
      params: the stored parameters, arrays or tracers.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> adam, params = optax.adam(1e-3), jnp.ones(2)
      >>> check_same_optimizer(adam, adam.init(params), params)
    """
    try:
        wanted = jax.eval_shape(optimizer.init, params)
    except jax.errors.JAXTypeError:  # it reads values, so it cannot be traced
        return
    for text, kind in _WRAPPERS.items():
        has, wants = bool(find_nodes(opt_state, kind)), bool(find_nodes(wanted, kind))
        if has != wants:
            sides = ("state.opt_state", "the step's optimizer")
            first, second = sides if has else reversed(sides)
            raise ValueError(
                f"{first} has {text}, but {second} has none; pass the same optimizer to train_step and "
                "TrainState.create"
            )
    names, wanted_names = _leaf_names(opt_state), _leaf_names(wanted)
    if names != wanted_names:
        extra = [name for name in names if name not in set(wanted_names)]
        missing = [name for name in wanted_names if name not in set(names)]
        raise ValueError(
            f"state.opt_state is from another optimizer than the step's: it has {_first(extra)} in addition, and "
            f"lacks {_first(missing)}; pass the same optimizer to train_step and TrainState.create"
        )


def check_is_train_state(state: object) -> None:
    """Raises TypeError with a remedy if the state passed to a step is not a `TrainState`."""
    if not hasattr(state, "model_state") or not hasattr(state, "opt_state"):
        kind = f"{type(state).__module__}.{type(state).__qualname__}"
        raise TypeError(
            f"state must be a jmp_train.TrainState, got {kind}; make one with TrainState.create(params, "
            "optimizer, model_state=..., rng=...), or from a flax TrainState with "
            "TrainState.create(state.params, state.tx)"
        )


def _leaf_names(opt_state: OptState) -> list[str]:
    leaves = jax.tree_util.tree_leaves_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, PerLossScale) or is_loss_scale(node)
    )
    return [path_name(path) for path, _ in leaves]


def _first(names: list[str]) -> str:
    if not names:
        return "nothing"
    return ", ".join(map(repr, names[:3])) + (", ..." if len(names) > 3 else "")
