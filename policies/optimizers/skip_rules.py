"""Rules by which `with_loss_scale` skips steps with finite gradients: their interface, their state, and `spikes`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jmp_train.policies.pytrees import check_count, check_number, find_nodes, mean_over_axes, select_tree
from jmp_train.policies.types import Grads, PyTree

State = TypeVar("State")

_SMALLEST, _LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


class SkipRule(NamedTuple, Generic[State]):
    """Two functions that decide by the gradients' norm whether a step is skipped; for `with_loss_scale(skip=...)`.

    Both are traced and run on every device; for equal arguments they must return equal results.

    Attributes:
      init: `init() -> state`, a pytree of arrays, which is stored in the optimizer's state.
      update: `update(grad_norm, state) -> (skip, next_state)`. The norm of the unscaled gradients is a float32 scalar
        that is the same on all devices; `skip` is a bool scalar; the next state has the same structure, shapes and
        dtypes, and is stored whether the step is skipped or taken. For a step with non-finite gradients both results
        are dropped, so the state stays unchanged.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> below_ten = jt.policies.SkipRule(init=tuple, update=lambda grad_norm, state: (grad_norm > 10.0, state))
      >>> optimizer = jt.with_loss_scale(optax.sgd(1.0), jt.NoOpLossScale(), skip=below_ten)
      >>> _, state = optimizer.update(jnp.full(2, 9.0), optimizer.init(jnp.ones(2)), jnp.ones(2))
      >>> bool(state.last_finite), bool(state.last_taken), int(state.skip_reason)
      (True, False, 2)
    """

    init: Callable[[], State]
    update: Callable[[jax.Array, State], tuple[jax.Array, State]]


class SkipRuleState(NamedTuple):
    """The `inner_state` of `with_loss_scale` with a skip rule.

    Attributes:
      inner_state: the wrapped optimizer's state; unchanged by a skipped step.
      rule_state: the state of the rule.
      last_skipped: bool scalar, True if the rule skipped the last step.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> state = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale(), skip=jt.spikes()).init(jnp.ones(2))
      >>> int(state.inner_state.rule_state.samples), bool(state.inner_state.last_skipped)
      (0, False)
    """

    inner_state: Any
    rule_state: Any
    last_skipped: jax.Array


def judged(
    rule: SkipRule[Any], grads: Grads, finite: jax.Array, state: SkipRuleState, axis_names: Sequence[str]
) -> SkipRuleState:
    """Returns the state after the rule has seen the gradients, with the wrapped optimizer's state unchanged.

    Args:
      rule: the rule.
      grads: unscaled gradients, in float32 or higher precision.
      finite: True if they are finite on all devices; otherwise the rule does not see them.
      state: the state before.
      axis_names: mesh axes whose devices decide together.
    """
    skip, rule_state = rule.update(_norm(grads, axis_names), state.rule_state)
    kept = select_tree(finite, rule_state, state.rule_state)
    return SkipRuleState(state.inner_state, kept, jnp.logical_and(finite, skip))


def taken_by_rules(finite: jax.Array, opt_state: PyTree) -> jax.Array:
    """Returns whether a step was taken: its gradients were finite, and no rule in the state skipped it."""
    for _, state in find_nodes(opt_state, SkipRuleState):
        finite = jnp.logical_and(finite, ~state.last_skipped)
    return finite


def reason_of_skip(finite: jax.Array, taken: jax.Array) -> jax.Array:
    """Returns the reason of a skip, int32: 0 if the step was taken, 1 for non-finite gradients, 2 by a rule."""
    return jnp.where(finite, jnp.where(taken, 0, 2), 1).astype(jnp.int32)


def _norm(grads: Grads, axis_names: Sequence[str]) -> jax.Array:
    """Returns the gradients' norm, float32; over devices the root of the mean of their squared norms.

    If all devices have the same gradients, it is their norm. If parameters are split over devices, each has a part, and
    all decide by the same number.
    """
    norm = jnp.asarray(optax.tree.norm(grads), jnp.float32)
    return jnp.sqrt(mean_over_axes(norm**2, axis_names)) if axis_names else norm


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
    check_count("window", window, 2)
    warmup = max(20, window // 2) if warmup is None else warmup
    for name, value, least in (("sigma", sigma, 0), ("min_ratio", min_ratio, 1)):
        check_number(name, value, f"a finite number above {least}", above=least)
    check_count("warmup", warmup, 2)

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
