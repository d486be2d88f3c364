"""The metrics of a train step, with the lost updates and underflowing gradients of each group of parameters."""

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.tree_util import GetAttrKey, KeyPath
from jax.typing import ArrayLike, DTypeLike

from jmp_train.policies import AutocastPolicy, Grads, Params, PathPolicy
from jmp_train.policies.dtype_policies import Policy
from jmp_train.policies.loss_scaling import AUTOCASTS_BY_AMP, PerLossScale
from jmp_train.policies.optimizers import (
    Addition,
    SkipRuleState,
    ZeroGradientsState,
    loss_scale_of,
    reason_of_skip,
    scaled_states,
)
from jmp_train.policies.pytrees import (
    find_nodes,
    is_float_array,
    is_half,
    is_inexact_array,
    path_name,
    shown,
    sum_over_axes,
    trained,
)
from jmp_train.steps.gradient_functions import StepGradients, StepOptions
from jmp_train.steps.gradients import own_aux
from jmp_train.steps.train_state import TrainState, Update
from jmp_train.types import Metrics

WATCHES = ("lost_updates", "underflow")
_MOST_GROUPS = 8
_ROOT, _OTHERS = "params", "others"


class Count(NamedTuple):
    """The number of lost elements of one array, as whole-number scalars.

    Attributes:
      lost: number of lost elements of `whole`.
      whole: number of nonzero elements.
    """

    lost: jax.Array
    whole: jax.Array


def checked_watches(watch: Sequence[str]) -> tuple[str, ...]:
    """Returns the names of watches as a tuple without repetitions.

    Args:
      watch: the argument of `train_step`.

    Raises:
      TypeError: `watch` is a string.
      ValueError: a name is unknown.

    Example:
      >>> checked_watches(["underflow"])
      ('underflow',)
    """
    if isinstance(watch, str):
        raise TypeError(f"watch={watch!r} must be a tuple of names: watch=({watch!r},)")
    if not isinstance(watch, list | tuple | set | frozenset):
        raise TypeError(f"watch={shown(watch)} must be a tuple of names")
    for name in watch:
        if name not in WATCHES:
            raise ValueError(f"watch: {name!r} is unknown; choose from {', '.join(map(repr, WATCHES))}")
    return tuple(dict.fromkeys(watch))


def group_names(params: Params) -> list[str]:
    """Returns the group of each leaf, in tree order: its module right under the root.

    A single wrapper around all modules, as linen's "params", is left out. More than eight modules are grouped by their
    names without the number at the end; if more than eight groups are left, they are the first seven and "others".

    Args:
      params: pytree of arrays; the group of a single array is "params".

    Example:
      >>> group_names({"params": {"Dense_0": {"bias": 0, "kernel": 0}, "Dense_1": {"kernel": 0}}})
      ['Dense_0', 'Dense_0', 'Dense_1']
      >>> group_names({"embed": 0, **{f"layer_{i}": 0 for i in range(12)}})[-2:]
      ['layer', 'layer']
    """
    paths = [_without_value(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
    if len({path[:1] for path in paths}) == 1 and all(len(path) > 1 for path in paths):
        paths = [path[1:] for path in paths]
    names = [path_name(path[:1]) or _ROOT for path in paths]
    if len(set(names)) > _MOST_GROUPS:
        names = [re.sub(r"[\W_]*\d+$", "", name) or _ROOT for name in names]
    if len(set(names)) > _MOST_GROUPS:
        kept = list(dict.fromkeys(names))[: _MOST_GROUPS - 1]
        names = [name if name in kept else _OTHERS for name in names]
    return names


def _without_value(path: KeyPath) -> KeyPath:
    return path[:-1] if path and path[-1] == GetAttrKey("value") else path


def watch_metrics(
    step: StepOptions, state: TrainState, grads: Any, additions: Sequence[Addition], taken: jax.Array
) -> Metrics:
    """Returns the metric "watch" of a step; nothing if `watch` is empty.

    Args:
      step: the step.
      state: the state before the step.
      grads: scaled gradients, averaged over the devices that share a batch; a tuple under a `PerLossScale`.
      additions: the optimizer's addition, if lost updates are watched; otherwise empty.
      taken: whether the step was taken. A skipped step loses no updates.
    """
    if not step.watch:
        return {}
    params = trained(state.params)
    names, counts = group_names(params), {}
    for addition in additions:
        counted = taken if scaled_states(state.opt_state) else True
        counts["lost_updates"] = _by_group(names, [_if_taken(counted, x) for x in count_lost_updates(addition)])
    if "underflow" in step.watch:
        dtype_of = half_type_of(step.policy, step.loss_fn)
        losses = grads if isinstance(loss_scale_of(state.opt_state), PerLossScale) else (grads,)
        found = [x for one in losses for x in count_underflows(trained(one), params, dtype_of, step.accumulate_steps)]
        counts["underflow"] = _by_group(names * len(losses), found)
    if step.model_axis_names:
        leaves, structure = jax.tree.flatten(counts)
        counts = jax.tree.unflatten(structure, list(sum_over_axes(jnp.stack(leaves), step.model_axis_names)))
    return {"watch": {name: {group: _share(x) for group, x in counts[name].items()} for name in step.watch}}


def _by_group(names: Sequence[str], counts: Sequence[Count]) -> dict[str, Count]:
    """Returns the sums of counts by group, in float32, which does not overflow."""
    totals = {name: Count(jnp.float32(0), jnp.float32(0)) for name in names}
    for name, count in zip(names, counts, strict=True):
        totals[name] = Count(*(total + x.astype(jnp.float32) for total, x in zip(totals[name], count, strict=True)))
    return totals


def _if_taken(taken: ArrayLike, count: Count) -> Count:
    return count._replace(lost=jnp.where(taken, count.lost, jnp.uint32(0)))


def _share(count: Count) -> jax.Array:
    return count.lost / jnp.maximum(count.whole, 1)  # 0 if nothing counts


def step_metrics(step: StepOptions, state: TrainState, result: StepGradients, update: Update) -> Metrics:
    """Returns the metrics of a step; `train_step` lists them.

    Args:
      step: the step.
      state: the state before the step.
      result: the result of the gradient function.
      update: the result of `apply_gradients`.
    """
    opt_state = update.state.opt_state
    skipped = [scaled.skipped_steps for _, scaled in scaled_states(opt_state)]
    zeros = [found.zeros for _, found in find_nodes(opt_state, ZeroGradientsState)]
    has_rule = bool(find_nodes(opt_state, SkipRuleState))
    state_finite = update.model_state_finite
    return {
        "loss": result.loss,
        "aux": own_aux(result.aux),
        "grad_norm": optax.tree.norm(trained(update.grads)),
        "grads_finite": update.finite,
        "loss_scale": jnp.asarray(loss_scale_of(opt_state).loss_scale, jnp.float32),
        "skipped_steps": skipped[0] if skipped else jnp.zeros((), jnp.int32),
        **({} if state_finite is None else {"model_state_finite": state_finite}),
        **({"num_zeros_in_grad": sum(zeros)} if zeros else {}),
        **({"skip_reason": reason_of_skip(update.finite, update.taken)} if has_rule else {}),
        **watch_metrics(step, state, result.grads, update.additions, update.taken),
    }


_HALF = 16  # bits
_MOST_COUNTED = 2**_HALF - 1


def half_type_of(policy: Policy | PathPolicy | None, loss_fn: object) -> Callable[[str, DTypeLike], np.dtype]:
    """Returns a function that finds the dtype in which the gradient of a parameter was computed.

    Args:
      policy: the policy of the step. Without one, the dtype is that to which an AMP mode autocasts, or the parameter's
        own; casts within a loss function are not seen.
      loss_fn: the loss function of the step.

    Returns:
      A function from a parameter's path and stored dtype to a dtype.

    Example:
      >>> from jmp_train.policies import get_policy
      >>> half_type_of(get_policy("autocast_float16"), None)("w", jnp.float32).name
      'float16'
    """
    default = None if policy is None else policy.default
    if isinstance(default, AutocastPolicy):
        autocast_dtype: DTypeLike | None = default.autocast_dtype
    else:
        autocast_dtype = getattr(loss_fn, AUTOCASTS_BY_AMP, None)

    def dtype_of(path: str, stored: DTypeLike) -> np.dtype:
        if autocast_dtype is not None:
            return jnp.dtype(autocast_dtype)
        return jnp.dtype(stored if policy is None else policy.policy_of(path).compute_dtype)

    return dtype_of


def count_lost_updates(addition: Addition) -> list[Count]:
    """Returns, for each array, the number of nonzero updates that leave the parameter unchanged.

    Args:
      addition: an optimizer's addition to the parameters.

    Example:
      >>> ones = jnp.ones(2, jnp.bfloat16)  # the next lower number is 2**-8 away
      >>> counts = count_lost_updates(Addition(ones, jnp.array([2.0**-13, 0.0]), ones))
      >>> int(counts[0].lost), int(counts[0].whole)
      (1, 1)
    """

    def count(old: jax.Array, update: jax.Array, new: jax.Array) -> Count:
        if not is_inexact_array(old):
            return Count(jnp.uint32(0), jnp.uint32(0))
        changes = _is_nonzero(update)
        return _counted(changes & _is_same(old, new), changes)

    return [count(*leaves) for leaves in zip(*map(jax.tree.leaves, addition), strict=True)]


def count_underflows(
    grads: Grads, params: Params, dtype_of: Callable[[str, DTypeLike], np.dtype], parts: int = 1
) -> list[Count]:
    """Returns, for each array, the number of nonzero gradients that are subnormal in a half type.

    Args:
      grads: scaled, in float32 or higher precision.
      params: arrays in the same tree.
      dtype_of: from `half_type_of`. Gradients in other dtypes are not counted.
      parts: number of micro-batches that the gradients sum; their mean is counted.

    Example:
      >>> w = jnp.ones(3)
      >>> counts = count_underflows(jnp.array([0.0, 2.0**-20, 1.0]), w, lambda path, dtype: jnp.dtype("float16"))
      >>> int(counts[0].lost), int(counts[0].whole)
      (1, 2)
    """

    def count(path: KeyPath, grad: jax.Array, param: jax.Array) -> Count:
        if not is_float_array(grad) or not is_half(half := dtype_of(path_name(path), param.dtype)):
            return Count(jnp.uint32(0), jnp.uint32(0))
        # Compares integers, because a device may flush subnormal floats to zero.
        magnitude = _magnitude_bits(grad)
        bound = np.asarray(float(jnp.finfo(half).smallest_normal) * parts, grad.dtype).view(magnitude.dtype)
        is_some = magnitude != 0
        return _counted(is_some & (magnitude < bound), is_some)

    counts = jax.tree_util.tree_map_with_path(count, grads, params)
    return jax.tree.leaves(counts, is_leaf=lambda x: isinstance(x, Count))


def _counted(lost: jax.Array, whole: jax.Array) -> Count:
    """Returns the number of True elements in each of two arrays.

    Both are counted in one reduction, in the two halves of a number, over as many elements as a half can count. XLA can
    reduce one array in its order in memory. For two arrays it cannot, and transposes a convolution's gradients.
    """
    both = whole.astype(jnp.uint32) | lost.astype(jnp.uint32) << _HALF
    partial = both.sum(_countable_dimensions(both.shape), dtype=jnp.uint32)
    return Count(_total(partial >> _HALF), _total(partial & _MOST_COUNTED))


def _total(x: jax.Array) -> jax.Array:
    return x.sum(dtype=jnp.uint32)


def _countable_dimensions(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns dimensions, the last ones first, with no more elements than half a number can count."""
    size, chosen = 1, []
    for dimension in reversed(range(len(shape))):
        if size * shape[dimension] <= _MOST_COUNTED:
            size *= shape[dimension]
            chosen.append(dimension)
    return tuple(chosen)


def _bits(x: jax.Array) -> jax.Array:
    # Bits, because XLA may compare values before they are rounded to half, and may flush subnormal numbers to zero.
    return lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))


def _magnitude_bits(x: jax.Array) -> jax.Array:
    bits = _bits(x)
    return bits & jnp.iinfo(bits.dtype).max >> 1


def _is_nonzero(x: jax.Array) -> jax.Array:
    return x != 0 if jnp.iscomplexobj(x) else _magnitude_bits(x) != 0


def _is_same(x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns which elements are equal; zeros may differ in their signs."""
    if jnp.iscomplexobj(x):
        return x == y
    bits = _bits(x), _bits(y)
    return (bits[0] == bits[1]) | ((bits[0] | bits[1]) << 1 == 0)
