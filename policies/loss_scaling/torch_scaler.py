"""Converts the state of `torch.amp.GradScaler` to a loss scale, and back, so that runs move without a new search.

torch's `state_dict` holds five values, which a loss scale from `torch_loss_scale()` has too::

    scale                loss_scale       a leaf
    _growth_tracker      counter          a leaf: non-overflow steps since the last change
    growth_factor        factor
    backoff_factor       backoff_factor
    growth_interval      period

No torch is needed: the dictionary has Python numbers only.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jmp_train.policies.loss_scaling.dynamic_loss_scale import DynamicLossScale
from jmp_train.policies.loss_scaling.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    LossScale,
    NoOpLossScale,
    StaticLossScale,
    check_backoff,
    check_growth,
    check_loss_scale,
    check_scale,
)
from jmp_train.policies.pytrees import check_count, is_integer

_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


def loss_scale_from_torch(state_dict: Mapping[str, Any]) -> DynamicLossScale | NoOpLossScale:
    """Returns the loss scale that continues a `torch.amp.GradScaler`.

    It changes in the same steps, to the same values, as that scaler would have, but
    within 2**-126 .. 2**126, like all our scales.

    Args:
      state_dict: from `GradScaler.state_dict()`. It is `{}` for a scaler that is not
        enabled.

    Returns:
      A loss scale as from `torch_loss_scale`, with its counter set; a `NoOpLossScale` for
      `{}`. Pass it to `with_loss_scale` for a new optimizer, or to `set_loss_scale` for an existing state.

    Raises:
      TypeError: `state_dict` is not a mapping.
      ValueError: keys are missing or unknown, or a value is of another type or out of its range;
        the message names the key.

    Example:
      >>> state_dict = {
      ...     "scale": 1024.0,
      ...     "growth_factor": 2.0,
      ...     "backoff_factor": 0.5,
      ...     "growth_interval": 2000,
      ...     "_growth_tracker": 1999,
      ... }
      >>> loss_scale = loss_scale_from_torch(state_dict)
      >>> float(loss_scale.adjust(True).loss_scale)
      2048.0

    Reference: PyTorch 2.13, torch/amp/grad_scaler.py (GradScaler.state_dict).
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"state_dict must be the dict that torch's GradScaler.state_dict() returns, got {state_dict!r}")
    if not state_dict:
        return NoOpLossScale()
    missing = [key for key in _KEYS if key not in state_dict]
    unknown = [key for key in state_dict if key not in _KEYS]
    if missing or unknown:
        raise ValueError(f"state_dict is not that of torch's GradScaler: missing {missing}, unknown {unknown}")
    scale, growth, backoff, interval, tracker = (state_dict[key] for key in _KEYS)
    check_scale("scale", scale)
    check_growth("growth_factor", growth)
    check_backoff("backoff_factor", backoff)
    check_count("growth_interval", interval)
    end = min(interval, 2**31)
    if not is_integer(tracker) or not 0 <= tracker < end:
        raise ValueError(
            f"_growth_tracker={tracker!r} must be an integer from 0 to {end - 1}, below growth_interval; torch's "
            "scale never grows beyond it"
        )
    return DynamicLossScale(
        float(scale),
        int(tracker),
        period=int(interval),
        factor=float(growth),
        min_loss_scale=SMALLEST_SCALE,
        backoff_factor=float(backoff),
    )


def loss_scale_to_torch(loss_scale: LossScale) -> dict[str, float | int]:
    """Returns the state for `torch.amp.GradScaler.load_state_dict` that continues a loss scale.

    Args:
      loss_scale: a concrete loss scale that behaves like torch's: it decreases on every overflow, and has
        no bounds of its own.

    Returns:
      The five entries, as Python numbers; `{}` for a `NoOpLossScale`, as for a scaler that is not
      enabled.

    Raises:
      TypeError: `loss_scale` is not a loss scale.
      ValueError: torch's scaler cannot behave like this one; the message names every field.

    Example:
      >>> from jmp_train.policies import torch_loss_scale
      >>> loss_scale_to_torch(torch_loss_scale().adjust(True))["_growth_tracker"]
      1

    Reference: PyTorch 2.13, torch/amp/grad_scaler.py (GradScaler.load_state_dict).
    """
    if isinstance(loss_scale, NoOpLossScale):
        return {}
    check_loss_scale(loss_scale, "get_loss_scale(opt_state) finds an optimizer's")
    if isinstance(loss_scale, StaticLossScale):
        raise ValueError(f"torch's GradScaler always adapts its scale, got {loss_scale!r}")
    if not isinstance(loss_scale, DynamicLossScale):
        raise ValueError(f"torch's GradScaler corresponds to a DynamicLossScale, got {loss_scale!r}")
    shape = np.shape(loss_scale.loss_scale)
    if shape or np.shape(loss_scale.counter):
        raise ValueError(f"loss_scale must be a scalar, got shape {shape}; select one device or ensemble member")
    problems = _inexpressible(loss_scale)
    if problems:
        raise ValueError("torch's GradScaler cannot do this:\n  " + "\n  ".join(problems))
    return {
        "scale": float(loss_scale.loss_scale),
        "growth_factor": float(loss_scale.factor),
        "backoff_factor": float(_backoff_factor(loss_scale)),
        "growth_interval": int(loss_scale.period),
        "_growth_tracker": int(loss_scale.counter),
    }


def _backoff_factor(loss_scale: DynamicLossScale) -> float:
    """Returns the factor on overflow, NaN if the scale is divided and a product would differ."""
    if loss_scale.backoff_factor is not None:
        return loss_scale.backoff_factor
    power_of_two = math.frexp(loss_scale.factor)[0] == 0.5
    return 1 / loss_scale.factor if power_of_two else math.nan


def _inexpressible(loss_scale: DynamicLossScale) -> list[str]:
    """Returns a line for each field with which torch's scaler would behave differently."""
    scale, counter = float(loss_scale.loss_scale), int(loss_scale.counter)
    period, factor = loss_scale.period, loss_scale.factor
    floor, ceiling = loss_scale.min_loss_scale, loss_scale.max_loss_scale
    rules = {
        f"loss_scale={scale} must be between 2**-126 and 2**126": (SMALLEST_SCALE <= scale <= LARGEST_SCALE),
        f"period={period} must be an integer of at least 1": (1 <= period < math.inf and period == int(period)),
        f"counter={counter} must be at least 0 and below the period": 0 <= counter < period,
        f"factor={factor} must be above 1 and at most 2**126": 1 < factor <= LARGEST_SCALE,
        f"backoff_factor={loss_scale.backoff_factor} must be at least 2**-126; None divides by the "
        f"factor, which is a product for powers of two only": (_backoff_factor(loss_scale) >= SMALLEST_SCALE),
        f"min_loss_scale={floor} must be at most 2**-126: torch has no floor": (floor <= SMALLEST_SCALE),
        f"max_loss_scale={ceiling} must be 2**126: torch has no ceiling": ceiling == LARGEST_SCALE,
        f"hysteresis={loss_scale.hysteresis} must be 1": loss_scale.hysteresis == 1,
        f"counter_start={loss_scale.counter_start} must be 0": loss_scale.counter_start == 0,
    }
    return [text for text, holds in rules.items() if not holds]
