"""`LossScaledState`, the state of `with_loss_scale`, and functions that read it, replace it and follow its skips.

Rules skip steps with finite gradients, as `spikes` does; their state is part of it.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jmp_train.policies.loss_scaling import (
    LossScales,
    NoOpLossScale,
    PerLossScale,
    StaticLossScale,
    check_loss_scales,
    scales_in,
)
from jmp_train.policies.pytrees import (
    check_count,
    check_number,
    copy_like,
    find_nodes,
    is_integer,
    mean_over_axes,
    named_leaves,
    only_state,
    path_name,
    select_state_leaf,
    select_tree,
    stays_finite,
    with_states,
)
from jmp_train.policies.types import Grads, PyTree

Tree = TypeVar("Tree")

# The presets' names of the fields of a `DynamicLossScale`.
_OF_PRESETS = {
    "period": " (a preset's growth_interval or window)",
    "factor": " (a preset's growth_factor or scale_factor)",
}


class LossScaledState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the `LossScale` of the next forward pass, or the `PerLossScale`.
      inner_state: the wrapped optimizer's state; unchanged by a skipped step. With a skip rule, a
        `SkipRuleState` of both.
      last_finite: bool scalar, True if the last gradients were finite; without a skip rule, the step was taken.
      skipped_steps: int32 scalar, number of skipped steps so far, for any reason.
      consecutive_skips: int32 scalar, number of steps skipped since the last one taken.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale, with_loss_scale
      >>> state = with_loss_scale(optax.sgd(0.1), torch_loss_scale()).init({"w": jnp.ones(2)})
      >>> int(state.skipped_steps), float(state.loss_scale.loss_scale)
      (0, 65536.0)
    """

    loss_scale: LossScales
    inner_state: Any
    last_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array

    @property
    def last_taken(self) -> jax.Array:
        """Bool scalar, True if the last step was taken: its gradients were finite, and no rule skipped it."""
        return taken_by_rules(self.last_finite, self.inner_state)

    @property
    def skip_reason(self) -> jax.Array:
        """Int32 scalar: 0 if the last step was taken, 1 if its gradients were not finite, 2 if the rule skipped it."""
        return reason_of_skip(self.last_finite, self.last_taken)


def scaled_states(opt_state: PyTree) -> list[tuple[str, LossScaledState]]:
    """Returns (path, state) of every outermost `LossScaledState` in any nesting."""
    return find_nodes(opt_state, LossScaledState)


def loss_scale_of(opt_state: PyTree) -> LossScales:
    """Returns the loss scale in an optimizer's state, or a `NoOpLossScale` if there is none."""
    return get_loss_scale(opt_state) if scaled_states(opt_state) else NoOpLossScale()


def get_loss_scale(opt_state: PyTree, *, loss_id: int | None = None) -> Any:
    """Returns the only loss scale in an optimizer's state.

    Args:
      opt_state: a state with one `LossScaledState` in it, in any nesting of optax's combinators, or an
        `nnx.Optimizer` with such a state, also within `nnx.jit`.
      loss_id: index of a loss of a `PerLossScale`, from 0; None for the whole loss scale.

    Returns:
      The `LossScale` of the next forward pass: `.loss_scale` is the number, `.scale(loss)` applies it. Or the
      `PerLossScale`, if there is one.

    Raises:
      ValueError: there is none, or there are several (the message lists their paths), or there is no
        loss of that index.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale, with_loss_scale
      >>> optimizer = optax.chain(with_loss_scale(optax.sgd(0.1), torch_loss_scale()))
      >>> float(get_loss_scale(optimizer.init(jnp.ones(2))).scale(jnp.float16(2.0)))
      131072.0
    """
    loss_scale = _only_scaled_state(opt_state).loss_scale
    if loss_id is None:
        return loss_scale
    scales = scales_in(loss_scale)
    if not is_integer(loss_id) or not 0 <= loss_id < len(scales):
        raise ValueError(f"loss_id={loss_id!r} must be a whole number below num_losses={len(scales)}")
    return scales[loss_id]


def set_loss_scale(opt_state: PyTree, loss_scale: LossScales) -> Any:
    """Returns an optimizer's state with its loss scale replaced.

    It sets the scale and its counters. Settings that are not leaves, such as the period, belong to the
    compiled step and must be equal. The counters of skips stay.

    Args:
      opt_state: a state with one `LossScaledState` in it, in any nesting of optax's combinators. An
        `nnx.Optimizer` with such a state is changed in place, as by its `update`, and returned.
      loss_scale: the scale of the next forward pass, of the same kind as in the state. Its arrays
        are copied to the placement of the state's.

    Returns:
      The same state except for the loss scale.

    Raises:
      TypeError: `loss_scale` is not a loss scale.
      ValueError: the state has no loss scale or several, or one of another kind, with other
        settings or of another shape; the message has the difference.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale, with_loss_scale
      >>> state = with_loss_scale(optax.sgd(0.1), torch_loss_scale()).init(jnp.ones(2))
      >>> state = set_loss_scale(state, torch_loss_scale(init_scale=1024.0))
      >>> float(get_loss_scale(state).loss_scale)
      1024.0

      As torch's `scaler.update(512.0)`, which keeps the settings and the count of good steps:

      >>> import dataclasses
      >>> scale = dataclasses.replace(get_loss_scale(state), loss_scale=jnp.float32(512))
      >>> float(get_loss_scale(set_loss_scale(state, scale)).loss_scale)
      512.0
    """
    check_loss_scales(loss_scale, "torch_loss_scale(init_scale=number) makes one")
    old = _only_scaled_state(opt_state).loss_scale
    if jax.tree_util.tree_structure(loss_scale) != jax.tree_util.tree_structure(old):
        settings = "keep them, dataclasses.replace(get_loss_scale(opt_state), loss_scale=number), or "
        raise ValueError(
            f"loss_scale differs from opt_state's in kind or settings: {_difference(loss_scale, old)}; "
            f"{settings if type(loss_scale) is type(old) else ''}make a new optimizer with with_loss_scale(optimizer, "
            "loss_scale) and call adopt_opt_state(new_optimizer.init(params), opt_state)"
        )
    jax.tree_util.tree_map_with_path(_check_shape, loss_scale, old)
    new = jax.tree_util.tree_map(copy_like, loss_scale, old)
    return with_states(opt_state, LossScaledState, lambda state: state._replace(loss_scale=new))


def _only_scaled_state(opt_state: PyTree) -> LossScaledState:
    return only_state(opt_state, LossScaledState, "loss_scale", "loss scales", "with_loss_scale")


def _difference(new: LossScales, old: LossScales) -> str:
    """Returns the structural fields that differ between two loss scales."""
    if isinstance(new, PerLossScale) and isinstance(old, PerLossScale):
        if len(new.loss_scales) != len(old.loss_scales):
            return f"for {len(old.loss_scales)} losses, not {len(new.loss_scales)}"
        pairs = zip(new.loss_scales, old.loss_scales, strict=True)
        structure = jax.tree_util.tree_structure
        return next(_difference(*pair) for pair in pairs if structure(pair[0]) != structure(pair[1]))
    if type(new) is not type(old):
        return f"a {type(old).__name__}, not a {type(new).__name__}"
    leaves = {name for tree in (new, old) for name, _ in named_leaves(tree)}
    fields = ", ".join(
        f"{field.name}={getattr(old, field.name)!r}, not {getattr(new, field.name)!r}{_OF_PRESETS.get(field.name, '')}"
        for field in (dataclasses.fields(new) if dataclasses.is_dataclass(new) else ())
        if field.name not in leaves and getattr(new, field.name) != getattr(old, field.name)
    )
    if fields:
        return fields
    if isinstance(new, StaticLossScale):
        return "the number of one is an array, that of the other is not"
    structures = [jax.tree_util.tree_structure(tree) for tree in (old, new)]
    return f"{structures[0]}, not {structures[1]}"


def _check_shape(path: KeyPath, new: ArrayLike, old: jax.Array) -> None:
    if jnp.shape(new) != jnp.shape(old):
        raise ValueError(
            f"loss_scale: {path_name(path)} must have shape {jnp.shape(old)} as in opt_state, got {jnp.shape(new)}; "
            "set it before replicating the state"
        )


def select_step(opt_state: PyTree, new: Tree, old: Tree, *, axis_names: Sequence[str] = ()) -> Tree:
    """Returns `new` if the optimizer's last step was taken and nothing in it overflowed, otherwise `old`.

    `with_loss_scale` keeps parameters and optimizer state in a skipped step. It does not see the
    values that the forward pass updates: batch statistics, an average of the parameters, the state of an
    equinox or nnx model, which an overflow may have filled with inf. A user-defined step passes
    them here, all in one tree; `train_step` does so for its model state.

    They may overflow even if all gradients are finite. If a number that was finite is not finite in `new`, the step
    stays taken, and the whole tree is `old` except for random keys (arrays of uint32 count as keys).
    `jmp_train.policies.stays_finite(new, old)` is False then.

    Args:
      opt_state: the state from the optimizer's `update`, with one `LossScaledState` in any
        nesting; or an object that holds it, such as a flax TrainState.
      new: pytree after the step. Leaves that are not arrays or numbers, such as functions,
        are taken from here.
      old: pytree of the same structure, shapes and dtypes, from before the step.
      axis_names: axes of an enclosing `shard_map` or `pmap` whose devices keep `old` together.

    Returns:
      A tree like `new`.

    Raises:
      TypeError: two leaves differ in shape or dtype; the message names the leaf.
      ValueError: the trees' structures differ, `opt_state` has no loss scale or several, or `MultiSteps` or
        `apply_if_finite` is around `with_loss_scale`, which then does not see every step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = optimizer.init(params)
      >>> updates, opt_state = optimizer.update({"w": jnp.array([1.0, jnp.inf])}, opt_state, params)
      >>> jt.select_step(opt_state, {"mean": jnp.full(1, jnp.inf)}, {"mean": jnp.zeros(1)})
      {'mean': Array([0.], dtype=float32)}
    """
    _check_sees_every_step(opt_state)
    state = only_state(opt_state, LossScaledState, "loss_scale", "loss scales", "with_loss_scale")
    taken = state.last_taken
    trees = [jax.tree_util.tree_structure(tree) for tree in (new, old)]
    if trees[0] != trees[1]:
        raise ValueError(f"new and old must have the same structure, got new:\n  {trees[0]}\nand old:\n  {trees[1]}")

    finite = stays_finite(new, old, axis_names)

    def select(path: KeyPath, x: object, y: object) -> Any:
        is_number = isinstance(x, int | float | complex) and not isinstance(x, np.generic)
        if x is y or (is_number and type(x) is type(y) and x == y):
            return x  # for example a setting of the model, which stays a Python number
        return select_state_leaf(path, taken, finite, x, y)

    return jax.tree_util.tree_map_with_path(select, new, old)


def _check_sees_every_step(opt_state: PyTree) -> None:
    """Raises ValueError with the name of the wrapper if `with_loss_scale` only sees the gradients of some steps."""
    around: Any = optax.MultiStepsState | optax.ApplyIfFiniteState
    for path, node in find_nodes(opt_state, around):
        if not scaled_states(tuple(node)):
            continue
        name = "MultiSteps" if isinstance(node, optax.MultiStepsState) else "apply_if_finite"
        raise ValueError(
            f"opt_state has {name}, at {path or 'the outermost place'!r}, around with_loss_scale: skipped steps are "
            "then not known, and NaN of an overflow may stay in its sums; put with_loss_scale outside: "
            f"with_loss_scale(optax.{name}(optimizer, ...), loss_scale)"
        )


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
