"""The metrics of a train step, with fractions of lost updates and underflowing gradients per group of parameters."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import GetAttrKey, KeyPath
from jax.typing import ArrayLike

from jmp_train.policies import Params
from jmp_train.policies.loss_scaling import PerLossScale
from jmp_train.policies.optimizers import (
    Addition,
    SkipRuleState,
    ZeroGradientsState,
    loss_scale_of,
    reason_of_skip,
    scaled_states,
)
from jmp_train.policies.pytrees import find_nodes, path_name, shown, sum_over_axes, trained
from jmp_train.steps.gradient_functions import StepGradients, StepOptions
from jmp_train.steps.train_state import TrainState
from jmp_train.steps.update import Update
from jmp_train.steps.watch_counts import Count, count_lost_updates, count_underflows, half_type_of
from jmp_train.steps.weighted_losses import own_aux
from jmp_train.types import Metrics

WATCHES = ("lost_updates", "underflow")
_MOST_GROUPS = 8
_ROOT, _OTHERS = "params", "others"


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
