"""`check_progress`: detects on the host that a run skips every step and cannot recover."""

import math
import warnings
from pathlib import Path
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from jmp_train.policies.loss_scaling import (
    DynamicLossScale,
    LossScale,
    LossScales,
    NoOpLossScale,
    PerLossScale,
    StaticLossScale,
    scales_in,
)
from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState, SkipRuleState, scaled_states
from jmp_train.policies.pytrees import check_count, find_nodes
from jmp_train.policies.types import PyTree


class StalledTrainingError(FloatingPointError):
    """Raised by `check_progress` when too many steps in a row were skipped.

    Example:
      >>> issubclass(StalledTrainingError, FloatingPointError)
      True
    """


class CapsuleRecorder(Protocol):
    """The part of a `SkipRecorder` that `check_progress` needs: the file of the last skipped step."""

    def last_capsule(self) -> Path | None:
        """Returns the newest capsule; None if there is none."""
        ...


def skips_to_floor(loss_scale: LossScales) -> int:
    """Returns the number of consecutive overflows that lower a loss scale to its lower bound.

    Args:
      loss_scale: a loss scale that is not traced. Without a lower bound above zero, the smallest normal
        float32 is used; for a `PerLossScale` the last loss counts. One of a user-defined class is
        adjusted 1024 times.

    Returns:
      The number of steps; 0 for a scale that does not decrease.

    Example:
      >>> from jmp_train.policies import megatron_loss_scale
      >>> skips_to_floor(megatron_loss_scale(initial_scale=256.0, hysteresis=2))
      9
    """
    if isinstance(loss_scale, PerLossScale):
        return max(map(skips_to_floor, loss_scale.loss_scales))
    if isinstance(loss_scale, NoOpLossScale | StaticLossScale):
        return 0
    if not isinstance(loss_scale, DynamicLossScale):
        return _last_fall(loss_scale)
    floor = max(np.float32(loss_scale.min_loss_scale), np.finfo(np.float32).tiny)
    factor = np.float32(loss_scale.backoff_factor or 1 / loss_scale.factor)
    scale = np.max(np.asarray(loss_scale.loss_scale))
    left = loss_scale.hysteresis_left
    waits = 0 if left is None else max(int(np.max(left)) - 1, 0)
    falls = 0
    while floor < scale > scale * factor:
        scale, falls = scale * factor, falls + 1
    return falls and falls + waits


def _last_fall(loss_scale: LossScale) -> int:
    """Returns the number of the last of 1024 consecutive overflows at which any loss scale decreases."""

    def overflow(scale: LossScale, _: None) -> tuple[LossScale, jax.Array]:
        return scale.adjust(jnp.array(False)), jnp.asarray(scale.loss_scale, jnp.float32)

    start = jax.tree_util.tree_map(lambda x: jnp.array(x, jnp.result_type(x)), loss_scale)
    _, scales = jax.lax.scan(overflow, start, None, 1025)
    falls = np.flatnonzero(np.diff(np.asarray(scales)) < 0)
    return int(falls[-1]) + 1 if falls.size else 0


def check_progress(
    opt_state: PyTree, *, stop_after: float, warn_after: int | None = None, recorder: CapsuleRecorder | None = None
) -> None:
    """Warns or raises if the last steps were all skipped; call it now and then, outside of jit.

    It waits for the state to be computed, so call it only every fifty steps or so. A scale that
    begins high skips a few steps before the first one is taken: let `stop_after` exceed
    `skips_to_floor(loss_scale)`. With `warn_after` it also warns of a dynamic scale that has decreased to 1
    or below while other steps were taken, for example when one batch of each epoch has a NaN.

    Args:
      opt_state: an optimizer's state with any number of loss scales in any nesting.
      stop_after: number of consecutive skips at which it raises; at least 1, `math.inf` for never.
      warn_after: number of consecutive skips at which it warns, or of all skips if the scale is 1 or below; at
        least 1, None for never.
      recorder: a `SkipRecorder`, whose last capsule the error and the warning name.

    Raises:
      StalledTrainingError: `stop_after` was reached.
      ValueError: a number is below 1, or the state has no loss scale.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale, with_loss_scale
      >>> optimizer = with_loss_scale(optax.sgd(0.1), StaticLossScale(8.0))
      >>> state = optimizer.init(jnp.ones(2))
      >>> check_progress(state, stop_after=1)
      >>> _, state = optimizer.update(jnp.array([1.0, jnp.nan]), state, jnp.ones(2))
      >>> check_progress(state, stop_after=1)  # doctest: +ELLIPSIS
      Traceback (most recent call last):
      jmp_train.policies.optimizers.stalls.StalledTrainingError: the last step was skipped ...
    """
    for name, number in (("stop_after", stop_after), ("warn_after", math.inf if warn_after is None else warn_after)):
        if not (isinstance(number, float | np.floating) and number == math.inf):
            check_count(name, number)
    found = scaled_states(opt_state)
    if not found:
        raise ValueError("opt_state has no loss scale; wrap the optimizer in with_loss_scale")
    for path, state in found:
        if isinstance(state.consecutive_skips, Tracer):
            raise ValueError("check_progress reads values on the host; call it outside of jit")
        skips = int(np.max(state.consecutive_skips))
        if skips >= stop_after:
            raise StalledTrainingError(_describe(path, state) + _capsule_of(recorder))
        if warn_after is None:
            continue
        message = _describe(path, state) if skips >= warn_after else _describe_collapse(path, state, warn_after)
        if message:
            warnings.warn(message + _capsule_of(recorder), RuntimeWarning, stacklevel=2)


def _describe(path: str, state: LossScaledState) -> str:
    """Returns the message; for the states of a vmap, about the one with the most skips."""
    all_skips = np.ravel(state.consecutive_skips)
    worst = int(np.argmax(all_skips))
    skips = int(all_skips[worst])
    steps = "step was" if skips == 1 else f"{skips} steps were"
    where = f" of opt_state {path!r}" if path else ""
    scales = scales_in(state.loss_scale)
    or_rule = " or by the skip rule" if find_nodes(state, SkipRuleState) else ""
    values = " and ".join(_number(scale, all_skips.shape, worst) for scale in scales)
    return (
        f"the last {steps} skipped for non-finite gradients{or_rule}; the loss scale{where} is now "
        f"{values}. NaN or inf in the data or the model does not go away with a lower "
        "scale: look at jmp_train.diagnose(step, state, batch), or at nonfinite_report(gradients)"
    )


def _describe_collapse(path: str, state: LossScaledState, warn_after: int) -> str:
    """Returns a warning about a dynamic scale at 1 or below; empty for higher ones and for few skips."""
    skipped = np.asarray(state.skipped_steps)
    scales = [
        float(np.min(scale.loss_scale))
        for scale in scales_in(state.loss_scale)
        if isinstance(scale, DynamicLossScale) and np.any((np.asarray(scale.loss_scale) <= 1) & (skipped >= warn_after))
    ]
    if not scales:
        return ""
    where = f" of opt_state {path!r}" if path else ""
    zero_below = float(jnp.finfo(jnp.float16).smallest_subnormal) / 2 / min(scales)
    return (
        f"{int(np.max(skipped))} steps were skipped, now and then, and the loss scale{where} is now {min(scales):g}, "
        f"at which float16 has zeros for gradients below {zero_below:.1g}. NaN or inf in some of the data, or an "
        "overflow in the forward pass, lowers the scale each time, and a lower scale does not help. Inspect a skipped "
        "batch with jmp_train.SkipRecorder and jmp_train.diagnose(step, state, batch)"
    )


def _capsule_of(recorder: CapsuleRecorder | None) -> str:
    capsule = None if recorder is None else recorder.last_capsule()
    return "" if capsule is None else f"; load_capsule({str(capsule)!r}, state) gives the step that was skipped last"


def _number(scale: LossScale, shape: tuple[int, ...], index: int) -> str:
    number = float(np.broadcast_to(np.ravel(scale.loss_scale), shape)[index])
    floor = f" (floor {scale.min_loss_scale:g})" if isinstance(scale, DynamicLossScale) else ""
    return f"{number:g}{floor}"
