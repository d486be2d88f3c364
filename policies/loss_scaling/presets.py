"""Loss scales of other frameworks, under those frameworks' argument names.

Each preset checks its arguments and returns a `DynamicLossScale` that changes in the same steps,
to the same values, as the original. Two bounds are ours: every scale stays within 2**-126 .. 2**126, because
outside of it the scale or its inverse is zero.
"""

import dataclasses

import numpy as np

from jmp_train.policies.loss_scaling.dynamic_loss_scale import DynamicLossScale
from jmp_train.policies.loss_scaling.loss_scale import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    NoOpLossScale,
    StaticLossScale,
    check_backoff,
    check_floor,
    check_growth,
    check_range,
    check_scale,
)
from jmp_train.policies.pytrees import check_count, check_flag, check_number, is_integer


def torch_loss_scale(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    enabled: bool = True,
) -> DynamicLossScale | NoOpLossScale:
    """Returns the loss scale of `torch.amp.GradScaler`.

    Args:
      init_scale: the initial scale.
      growth_factor: factor of the growth after `growth_interval` non-overflow steps; above 1.
      backoff_factor: factor on overflow; between 0 and 1.
      growth_interval: non-overflow steps before it grows; at least 1.
      enabled: False returns a `NoOpLossScale`.

    Returns:
      A loss scale for `with_loss_scale`. As in torch, its only lower bound is the smallest normal
      float32, 2**-126.

    Raises:
      ValueError: an argument is invalid; the message names it.

    Example:
      >>> float(torch_loss_scale().loss_scale)
      65536.0

    Reference: PyTorch 2.13, torch/amp/grad_scaler.py and aten AmpKernels.cu.
    """
    check_flag("enabled", enabled)
    check_scale("init_scale", init_scale)
    check_growth("growth_factor", growth_factor)
    check_backoff("backoff_factor", backoff_factor)
    check_count("growth_interval", growth_interval)
    if not enabled:
        return NoOpLossScale()
    return DynamicLossScale(
        float(init_scale),
        period=growth_interval,
        factor=float(growth_factor),
        min_loss_scale=SMALLEST_SCALE,
        backoff_factor=backoff_factor,
    )


def apex_loss_scale(
    loss_scale: float | str = "dynamic",
    init_scale: float = 2.0**16,
    scale_factor: float = 2.0,
    scale_window: int = 2000,
    min_loss_scale: float | None = None,
    max_loss_scale: float = 2.0**24,
) -> DynamicLossScale | StaticLossScale:
    """Returns the loss scale of `apex.amp`.

    Args:
      loss_scale: "dynamic", or a number for a `StaticLossScale`.
      init_scale: the initial scale, clipped to `max_loss_scale`.
      scale_factor: factor of growth and decrease; above 1.
      scale_window: non-overflow steps before it grows; at least 1.
      min_loss_scale: the lower bound; None or 0 for none.
      max_loss_scale: the upper bound.

    Returns:
      A loss scale for `with_loss_scale`.

    Raises:
      ValueError: an argument is invalid; the message names it.

    Example:
      >>> apex_loss_scale(loss_scale=128.0)
      StaticLossScale(loss_scale=128.0)

    Reference: NVIDIA Apex e13873de, apex/amp/scaler.py.
    """
    if not (isinstance(loss_scale, str) and loss_scale == "dynamic"):
        check_scale("loss_scale", loss_scale)
        return StaticLossScale(float(loss_scale))
    check_scale("init_scale", init_scale)
    check_growth("scale_factor", scale_factor)
    check_count("scale_window", scale_window)
    check_range("max_loss_scale", max_loss_scale)
    start, floor = min(float(init_scale), float(max_loss_scale)), SMALLEST_SCALE
    if min_loss_scale is not None:
        check_number("min_loss_scale", min_loss_scale)
        floor = float(min_loss_scale) or floor
        check_floor("min_loss_scale", floor, start)
    return DynamicLossScale(
        float(start),
        period=scale_window,
        factor=scale_factor,
        min_loss_scale=floor,
        max_loss_scale=float(max_loss_scale),
    )


def megatron_loss_scale(
    initial_scale: float = 2.0**32,
    min_scale: float = 1.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 1000,
    hysteresis: int = 2,
    max_scale: float = LARGEST_SCALE,
) -> DynamicLossScale:
    """Returns the loss scale of Megatron-LM, and with a `max_scale` that of ColossalAI.

    Args:
      initial_scale: the initial scale.
      min_scale: the lower bound.
      growth_factor: factor of the growth after `growth_interval` non-overflow steps; above 1.
      backoff_factor: factor of the decrease; between 0 and 1.
      growth_interval: non-overflow steps before it grows; at least 1.
      hysteresis: overflows since the last growth before the scale decreases; at least 1.
      max_scale: the upper bound; ColossalAI's is 2**32.

    Returns:
      A loss scale for `with_loss_scale`.

    Raises:
      ValueError: an argument is invalid; the message names it.

    Example:
      >>> scale = megatron_loss_scale().adjust(False)
      >>> float(scale.loss_scale) == 2.0**32, float(scale.adjust(False).loss_scale) == 2.0**31
      (True, True)

    Reference: Megatron-LM d98e8a64, megatron/core/optimizer/grad_scaler.py (DynamicGradScaler);
    ColossalAI 4f9953be, DynamicGradScaler.
    """
    check_scale("initial_scale", initial_scale)
    check_growth("growth_factor", growth_factor)
    check_backoff("backoff_factor", backoff_factor)
    check_count("growth_interval", growth_interval)
    check_count("hysteresis", hysteresis)
    check_range("max_scale", max_scale)
    check_floor("min_scale", min_scale, initial_scale)
    if initial_scale > max_scale:
        raise ValueError(f"initial_scale={initial_scale} must not exceed max_scale={max_scale}")
    return DynamicLossScale(
        float(initial_scale),
        period=growth_interval,
        factor=float(np.float32(growth_factor)),  # Megatron stores both in float32
        min_loss_scale=float(min_scale),
        backoff_factor=float(np.float32(backoff_factor)),
        max_loss_scale=float(max_scale),
        hysteresis=hysteresis,
    )


def nemo_loss_scale(
    init_scale: float = 2.0**16,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    hysteresis: int = 1,
    enabled: bool = True,
) -> DynamicLossScale | NoOpLossScale:
    """Returns the loss scale of NeMo's `GradScaler`: torch's with consecutive hysteresis.

    Args:
      init_scale: the initial scale.
      growth_factor: factor of the growth after `growth_interval` non-overflow steps; above 1.
      backoff_factor: factor of the decrease; between 0 and 1.
      growth_interval: non-overflow steps before it grows; at least 1.
      hysteresis: consecutive overflows before the scale decreases; at least 1.
      enabled: False returns a `NoOpLossScale`.

    Returns:
      A loss scale for `with_loss_scale`.

    Raises:
      ValueError: an argument is invalid; the message names it.

    Example:
      >>> scale = nemo_loss_scale(hysteresis=2).adjust(False).adjust(True).adjust(False)
      >>> float(scale.loss_scale)  # two overflows, but not in a row
      65536.0

    Reference: Apex e13873de, csrc/update_scale_hysteresis.cu, as NeMo uses it.
    """
    check_count("hysteresis", hysteresis)
    scale = torch_loss_scale(init_scale, growth_factor, backoff_factor, growth_interval, enabled)
    if isinstance(scale, NoOpLossScale):
        return scale
    return dataclasses.replace(scale, hysteresis=hysteresis, consecutive_hysteresis=True, hysteresis_left=None)


def deepspeed_loss_scale(
    loss_scale: float = 0.0,
    initial_scale_power: int = 16,
    loss_scale_window: int = 1000,
    hysteresis: int = 2,
    consecutive_hysteresis: bool = False,
    min_loss_scale: float = 1.0,
) -> DynamicLossScale | StaticLossScale:
    """Returns the loss scale of DeepSpeed, under the names of its "fp16" configuration.

    DeepSpeed's fused optimizer ignores hysteresis; `hysteresis=1` has the same effect.

    Args:
      loss_scale: 0 for a dynamic scale, another number for a `StaticLossScale`.
      initial_scale_power: the exponent of two of the initial scale.
      loss_scale_window: non-overflow steps before it doubles; one more after the start or an overflow.
      hysteresis: overflows before it is halved; at least 1.
      consecutive_hysteresis: True if every non-overflow step resets the hysteresis, False if only a growth does.
      min_loss_scale: the lower bound.

    Returns:
      A loss scale for `with_loss_scale`.

    Raises:
      ValueError: an argument is invalid; the message names it.

    Example:
      >>> float(deepspeed_loss_scale(initial_scale_power=8).loss_scale)
      256.0

    Reference: DeepSpeed edaa7221, deepspeed/runtime/fp16/loss_scaler.py (DynamicLossScaler).
    """
    check_number("loss_scale", loss_scale)
    if loss_scale != 0:
        check_scale("loss_scale", loss_scale)
        return StaticLossScale(float(loss_scale))
    if not is_integer(initial_scale_power) or not -126 <= initial_scale_power <= 126:
        raise ValueError(f"initial_scale_power={initial_scale_power!r} must be an integer from -126 to 126")
    check_count("loss_scale_window", loss_scale_window)
    check_count("hysteresis", hysteresis)
    check_flag("consecutive_hysteresis", consecutive_hysteresis)
    start = 2.0**initial_scale_power
    check_floor("min_loss_scale", min_loss_scale, start)
    return DynamicLossScale(
        start,
        counter=-1,
        period=loss_scale_window,
        min_loss_scale=float(min_loss_scale),
        hysteresis=hysteresis,
        consecutive_hysteresis=consecutive_hysteresis,
        counter_start=-1,
    )
