"""Checks of the arguments of a train step, made once per trace before anything is computed.

Each check is a function of a `Call` in the list `CHECKS`. Add new checks there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies.dtype_policies import FirstTrace, PathPolicy, Policy
from jmp_train.policies.loss_scaling import PerLossScale
from jmp_train.policies.optimizers import check_nesting, extra_arguments, loss_scale_of, scaled_states
from jmp_train.policies.pytrees import at_least_float32, is_float_array, named_leaves, trained
from jmp_train.steps.step_checks import check_is_train_state, check_same_optimizer
from jmp_train.steps.train_state import TrainState
from jmp_train.types import Batch


class Checked(Protocol):
    """The attributes of a `TrainStep` that the checks read."""

    @property
    def policy(self) -> Policy | PathPolicy | None:
        """The policy."""
        ...

    @property
    def optimizer(self) -> optax.GradientTransformationExtraArgs:
        """The outermost optimizer."""
        ...

    @property
    def all_axes(self) -> tuple[str, ...]:
        """The mesh axes whose devices take or skip the step together."""
        ...

    @property
    def first_trace(self) -> FirstTrace:
        """Remembers the warnings that were given."""
        ...


class Call(NamedTuple):
    """A call of a train step.

    Attributes:
      step: the step.
      state: its first argument, a `TrainState`.
      batch: its second argument.
    """

    step: Checked
    state: TrainState
    batch: Batch


def check_call(step: Checked, state: TrainState, batch: Batch) -> None:
    """Raises or warns if a step would compute something else than its user expects.

    Args:
      step: the step.
      state: a `TrainState`; other types raise TypeError.
      batch: the batch.
    """
    check_is_train_state(state)
    for check in CHECKS:
        check(Call(step, state, batch))


def warn_of_collapsed_values(call: Call) -> None:
    """Warns if different values of the batch become equal when cast. Traced arrays are not checked."""
    call.step.first_trace.look_at_values({"batch": call.batch}, call.step.policy)


def refuse_low_precision_params(call: Call) -> None:
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


def refuse_other_optimizer(call: Call) -> None:
    """Raises ValueError if the optimizer state belongs to another optimizer."""
    check_same_optimizer(call.step.optimizer, call.state.opt_state, trained(call.state.params))


def refuse_wrong_nesting(call: Call) -> None:
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


def warn_of_missing_loss_scale(call: Call) -> None:
    """Warns if the policy computes in float16 and the optimizer has no loss scale."""
    if not scaled_states(call.state.opt_state):
        call.step.first_trace.miss_loss_scale(call.step.policy)


CHECKS: tuple[Callable[[Call], None], ...] = (
    warn_of_collapsed_values,
    refuse_low_precision_params,
    refuse_other_optimizer,
    refuse_wrong_nesting,
    warn_of_missing_loss_scale,
)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Any:
    """Returns an array that stands for a gradient of this shape and dtype, and takes no memory."""
    return np.broadcast_to(np.zeros((), dtype), shape)
