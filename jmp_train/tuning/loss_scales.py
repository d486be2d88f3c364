"""The loss scales that tuning chooses from: those that training with the rules can reach."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jmp_train.policies.loss_scaling import DynamicLossScale, NoOpLossScale, StaticLossScale
from jmp_train.policies.optimizers import get_loss_scale, scaled_states, set_loss_scale
from jmp_train.steps import TrainState
from jmp_train.tuning.subjects import Example
from jmp_train.tuning.tolerance import Reference

_ABOVE_1 = tuple(2.0**exponent for exponent in (15, 12, 9, 6, 3, 0))
_BELOW_1 = tuple(2.0**exponent for exponent in range(-4, -121, -4))
_FURTHER = 2  # scales below that at which the largest gradient fits: those of activations may be larger


def scales_of(examples: Sequence[Example], references: Sequence[Reference], half: Any) -> tuple[float, ...]:
    """Returns the loss scales to choose from, the largest first.

    Scales below 1 are included if gradients exceed the half type's range. If the state of a step has a static loss
    scale, it is the only choice. If it has a dynamic one, its bounds apply.

    Args:
      examples: arguments of the tuned function.
      references: float32 outcomes of all examples.
      half: the half type.
    """
    gradients = [x for reference in references for x in reference.outcome.gradients.values()]
    if half == jnp.bfloat16 or not gradients:
        return (1.0,)
    most = float(jnp.finfo(half).max)
    largest = max(float(jnp.abs(x).max(initial=0)) for x in gradients)
    too_large = sum(largest * scale > most for scale in (1.0, *_BELOW_1))
    scales = (*_ABOVE_1, *_BELOW_1[: too_large + _FURTHER if too_large else 0])
    own = _own_scale(examples[0])
    if isinstance(own, StaticLossScale | NoOpLossScale):
        return (float(own.loss_scale),)
    if isinstance(own, DynamicLossScale):
        low, high = float(own.min_loss_scale), float(own.max_loss_scale)
        return tuple(dict.fromkeys(min(max(scale, low), high) for scale in scales))
    return scales


def with_loss_scale_at(state: TrainState, scale: float) -> TrainState:
    """Returns the state with its dynamic loss scale, if it has one, set to a value.

    Args:
      state: state of a step.
      scale: the loss scale that tuning found.
    """
    old = _own_scale((state,))
    if not isinstance(old, DynamicLossScale):
        return state
    new = dataclasses.replace(old, loss_scale=jnp.full_like(old.loss_scale, scale))
    return dataclasses.replace(state, opt_state=set_loss_scale(state.opt_state, new))


def _own_scale(example: Example) -> Any:
    """Returns the loss scale of a state among a function's arguments; None if there is not exactly one."""
    states: Iterator[TrainState] = (x for x in example if isinstance(x, TrainState))
    found = [state.opt_state for state in states if len(scaled_states(state.opt_state)) == 1]
    return get_loss_scale(found[0]) if found else None
