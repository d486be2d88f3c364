"""Rules by which `with_loss_scale` skips steps whose gradients are finite, and where their state is kept."""

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

    Both are traced and run on every device; given the same, they have to return the same.

    Attributes:
      init: `init() -> state`, a pytree of arrays, which is kept in the optimizer's state.
      update: `update(grad_norm, state) -> (skip, next_state)`: the norm of the unscaled gradients, a float32 scalar
        that is the same on all devices; a bool scalar; and the next state, of the same structure, shapes and dtypes,
        which is kept whether the step is skipped or taken. Of a step with non-finite gradients both results are
        dropped, so it leaves no trace in the state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> below_ten = jt.SkipRule(init=tuple, update=lambda grad_norm, state: (grad_norm > 10.0, state))
      >>> optimizer = jt.with_loss_scale(optax.sgd(1.0), jt.NoOpLossScale(), skip=below_ten)
      >>> _, state = optimizer.update(jnp.full(2, 9.0), optimizer.init(jnp.ones(2)), jnp.ones(2))
      >>> bool(state.last_finite), bool(state.last_taken), int(state.skip_reason)
      (True, False, 2)
    """

    init: Callable[[], State]
    update: Callable[[jax.Array, State], tuple[jax.Array, State]]


class SkipRuleState(NamedTuple):
    """What `with_loss_scale` keeps as its `inner_state` where it has a skip rule.

    Attributes:
      inner_state: the wrapped optimizer's state; unchanged by a skipped step.
      rule_state: the rule's own.
      last_skipped: bool scalar, whether the rule skipped the last step.

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
    """Returns the wrapped optimizer's state; raises ValueError if there is a rule and no state of it, or vice versa."""
    if isinstance(inner_state, SkipRuleState) != (rule is not None):
        has, wants = ("no", "has one") if rule is not None else ("a", "has none")
        raise ValueError(
            f"state has {has} skip rule's state, and with_loss_scale {wants}: skip has to be what it was at init; "
            "adopt_opt_state(optimizer.init(params), state) goes on with another"
        )
    return inner_state.inner_state if rule is not None else inner_state


def judged(
    rule: SkipRule[Any], grads: Grads, finite: jax.Array, state: SkipRuleState, axis_names: Sequence[str]
) -> SkipRuleState:
    """Returns the state after the rule saw these gradients, with the wrapped optimizer's as it was.

    Args:
      rule: whose state it is.
      grads: unscaled, in float32 or higher precision.
      finite: whether they are, on all devices; else the rule sees nothing of them.
      state: the one before.
      axis_names: mesh axes over which the decision is one.
    """
    skip, rule_state = rule.update(_norm(grads, axis_names), state.rule_state)
    kept = select_tree(finite, rule_state, state.rule_state)
    return SkipRuleState(state.inner_state, kept, jnp.logical_and(finite, skip))


def taken_by_rules(finite: jax.Array, opt_state: PyTree) -> jax.Array:
    """Returns whether a step was taken: whether its gradients were finite, and no rule in the state skipped it."""
    for _, state in find_nodes(opt_state, SkipRuleState):
        finite = jnp.logical_and(finite, ~state.last_skipped)
    return finite


def reason_of_skip(finite: jax.Array, taken: jax.Array) -> jax.Array:
    """Returns why a step was skipped, int32: 0 if it was taken, 1 for non-finite gradients, 2 by a rule."""
    return jnp.where(finite, jnp.where(taken, 0, 2), 1).astype(jnp.int32)


def _norm(grads: Grads, axis_names: Sequence[str]) -> jax.Array:
    """Returns the gradients' norm, float32; over devices the root of the mean of the squares of theirs.

    Where all have the same gradients it is that of any. Where parameters are split over them each has a part, and
    all have to decide by one number.
    """
    norm = jnp.asarray(optax.tree.norm(grads), jnp.float32)
    return jnp.sqrt(mean_over_axes(norm**2, axis_names)) if axis_names else norm
