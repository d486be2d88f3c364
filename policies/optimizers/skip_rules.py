"""Rules by which `with_loss_scale` skips steps with finite gradients, and the place of their state."""

from collections.abc import Callable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.pytrees import find_nodes, mean_over_axes, select_tree
from jmp_train.policies.types import Grads, PyTree

State = TypeVar("State")


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


def with_rule_state(rule: SkipRule[Any] | None, inner_state: PyTree) -> Any:
    """Returns the wrapped optimizer's first state, with the rule's around it if there is one."""
    if rule is None:
        return inner_state
    return SkipRuleState(inner_state, jax.tree_util.tree_map(jnp.array, rule.init()), jnp.array(False))


def wrapped_state(rule: SkipRule[Any] | None, inner_state: Any) -> Any:
    """Returns the wrapped optimizer's state; raises ValueError if it has a rule's state but no rule, or vice versa."""
    if isinstance(inner_state, SkipRuleState) != (rule is not None):
        has, wants = ("no", "has one") if rule is not None else ("a", "has none")
        raise ValueError(
            f"skip must be the same as at init: state has {has} skip rule's state, but with_loss_scale {wants}; to "
            "change it, call adopt_opt_state(optimizer.init(params), state)"
        )
    return inner_state.inner_state if rule is not None else inner_state


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
