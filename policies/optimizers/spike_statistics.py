"""`spikes`: the rule that skips a step whose gradient norm is far above its running mean."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.optimizers.skip_rules import SkipRule

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class SpikeStatistics(NamedTuple):
    """State of `spikes`.

    Attributes:
      mean: float32 scalar, mean of the natural logarithm of the gradient norm.
      variance: float32 scalar, its variance.
      samples: int32 scalar, number of norms in the statistics.

    Example:
      >>> import jax.numpy as jnp
      >>> rule = spikes()
      >>> skip, statistics = rule.update(jnp.float32(1.0), rule.init())
      >>> bool(skip), float(statistics.mean), int(statistics.samples)
      (False, 0.0, 1)
    """

    mean: jax.Array
    variance: jax.Array
    samples: jax.Array


def spikes(
    sigma: float = 6.0, window: int = 128, *, warmup: int | None = None, min_ratio: float = 2.0
) -> SkipRule[SpikeStatistics]:
    """Returns the rule that skips a step whose gradient norm is far above its running mean.

    The statistics are those of the norm's logarithm: mean and variance over all norms at first, and after `window`
    steps with weights that decrease by 1 - 1/window per step. With the mean m and the standard deviation s before a
    step, the step is a spike if log(norm) - m is above `sigma` s and above log(`min_ratio`).

    A spike enters the statistics as the largest norm that is not a spike, and so does a norm as far below the mean. So
    one spike raises the threshold a little. If the level of the norm has really changed, the threshold grows
    exponentially until it accepts the steps again: with the defaults after about 11 consecutive spikes if the norm is
    10 times as large, and about 23 if it is 10,000 times as large. The rule never skips forever. Steps with non-finite
    gradients do not enter the statistics, nor do norms of zero, whose steps are taken.

    Args:
      sigma: number of standard deviations above the mean.
      window: number of steps over which mean and variance run, approximately; at least 2.
      warmup: number of norms in the statistics before a step is skipped; at least 2. They enter unchanged.
        None for half a window, and at least 20.
      min_ratio: a norm below this many times the (geometric) mean is never a spike, however steady the norm was;
        above 1.

    Returns:
      A rule for `with_loss_scale(optimizer, loss_scale, skip=...)`; its state is a `SpikeStatistics`.

    Raises:
      ValueError: a number is out of range.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> rule = jt.spikes(window=8, warmup=4)
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(4.0), skip=rule)
      >>> params, skipped = jnp.ones(1), []
      >>> state = optimizer.init(params)
      >>> for grad in (1.0, 1.2, 0.9, 1.0, 50.0, 1.1):
      ...     _, state = optimizer.update(jnp.array([4.0 * grad]), state, params)
      ...     skipped.append(int(state.skip_reason))
      >>> skipped, float(state.loss_scale.loss_scale)
      ([0, 0, 0, 0, 2, 0], 4.0)

    Reference: OLMo-core's `SkipStepOptimizer`, for skipping at 6 standard deviations over 128 steps, from half of them
    on; Kumar et al., "ZClip", https://arxiv.org/abs/2504.02507, for clipping a spike before it enters running
    statistics. The logarithm is ours.
    """
    warmup = max(20, window // 2) if warmup is None else warmup
    for name, value, least in (("sigma", sigma, 0), ("min_ratio", min_ratio, 1)):
        if isinstance(value, str) or not least < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a finite number above {least}")
    for name, number in (("window", window), ("warmup", warmup)):
        if not isinstance(number, int) or number < 2:
            raise ValueError(f"{name}={number!r} must be a whole number of at least 2")

    def init() -> SpikeStatistics:
        return SpikeStatistics(jnp.zeros(()), jnp.zeros(()), jnp.zeros((), jnp.int32))

    def update(grad_norm: jax.Array, state: SpikeStatistics) -> tuple[jax.Array, SpikeStatistics]:
        deviation = jnp.log(jnp.clip(grad_norm, _SMALLEST, _LARGEST)) - state.mean
        limit = jnp.maximum(sigma * jnp.sqrt(state.variance), math.log(min_ratio))
        ready = state.samples >= warmup
        clipped = jnp.where(ready, jnp.clip(deviation, -limit, limit), deviation)
        after = _with_sample(state, clipped, window)
        return ready & (deviation > limit), jax.tree_util.tree_map(
            lambda new, old: jnp.where(grad_norm == 0, old, new), after, state
        )

    return SkipRule(init, update)


def _with_sample(state: SpikeStatistics, deviation: jax.Array, window: int) -> SpikeStatistics:
    """Returns statistics with one more sample, given its deviation from the mean."""
    samples = jnp.minimum(state.samples, np.iinfo(np.int32).max - 1) + 1
    share = 1 / jnp.minimum(samples, window).astype(jnp.float32)
    variance = (1 - share) * (state.variance + share * deviation**2)
    return SpikeStatistics(state.mean + share * deviation, variance, samples)
