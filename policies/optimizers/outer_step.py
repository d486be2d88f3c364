"""One step of any optimizer: its extra arguments, gradients and state; and a check of nested optimizer wrappers.

optax passes extra arguments, such as the loss, on to all optimizers that it combines, and few of them declare which
they take. So the types of their states decide.

The states of optax's combinators tell what they hold, but not what they change. So the check traces one step, in which
every wrapper notes what passes through it: `with_loss_scale` must take the gradients that the step was given, and
the step must return the updates of a wrapper that stores parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib
from jax.tree_util import KeyPath

from jmp_train.policies.loss_scaling import PerLossScale
from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState, SkipRuleState, loss_scale_of, scaled_states
from jmp_train.policies.optimizers.state_dtypes import StateDtypesState
from jmp_train.policies.optimizers.stored_parameters import (
    Addition,
    ParamsOptimizer,
    StoringOptimizer,
    StoringState,
    noted_updates,
    proposed_params,
)
from jmp_train.policies.programs import INLINED, Reading
from jmp_train.policies.pytrees import change_nodes, find_nodes, named_leaves, select_leaf, upcast_to_float32
from jmp_train.policies.types import Grads, OptState, Params, PyTree

# Returns loss and unscaled gradients at given parameters.
Evaluate = Callable[[Any], tuple[jax.Array, Any]]

_LINE_SEARCHES = (optax.ScaleByZoomLinesearchState, optax.ScaleByBacktrackingLinesearchState)


def extra_arguments(opt_state: OptState, loss: jax.Array, grads: Grads, evaluate: Evaluate | None) -> dict[str, Any]:
    """Returns the extra arguments of `optimizer.update`.

    Args:
      opt_state: the optimizer's state.
      loss: the loss of this step.
      grads: the unscaled gradients of this step, for the parameters that the optimizer updates.
      evaluate: evaluates the step's batch again; None if that is not possible.

    Raises:
      ValueError: the optimizer evaluates the loss again, and there is no `evaluate`; the message names it.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> params = jnp.ones(2)
      >>> state = optax.lbfgs().init(params)
      >>> sorted(extra_arguments(state, params.sum(), params, lambda p: (p.sum(), jnp.ones_like(p))))
      ['grad', 'value', 'value_fn']
    """
    if find_nodes(opt_state, optax.contrib.SAMState):  # takes no other argument, not even the loss
        return {"grad_fn": lambda params, number: _evaluated(evaluate, "sam(opaque_mode=True)")(params)[1]}
    if any(find_nodes(opt_state, kind) for kind in _LINE_SEARCHES):
        return {"value": loss, "grad": grads, "value_fn": _loss_fn(_evaluated(evaluate, "a line search"))}
    if find_nodes(opt_state, optax.contrib.HutchinsonState):
        return {"value": loss, "obj_fn": _loss_fn(_evaluated(evaluate, "sophia"))}
    return {"value": loss}


def _evaluated(evaluate: Evaluate | None, name: str) -> Evaluate:
    if evaluate is None:
        raise ValueError(
            f"optimizer: {name} evaluates the loss at other parameters, which a step over several devices cannot do; "
            "call the step on one device"
        )
    return evaluate


def _loss_fn(evaluate: Evaluate) -> Callable[[Any], jax.Array]:
    """Returns the loss as a function whose gradients are those of `evaluate`: scaled in between, then unscaled."""

    @jax.custom_vjp
    def loss_fn(params: Params) -> jax.Array:
        return evaluate(params)[0]

    def backward(grads: Grads, cotangent: jax.Array) -> tuple[Any]:
        return (jax.tree.map(lambda g: (cotangent * g).astype(g.dtype), grads),)

    loss_fn.defvjp(evaluate, backward)
    return lambda params: loss_fn(params)


def optimizer_step(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Grads,
    finite: jax.Array,
    opt_state: OptState,
    params: Params,
    on_addition: Callable[[Addition], None] | None = None,
    **extra_args: object,
) -> tuple[Any, Any]:
    """Returns the parameters after a step of any optimizer, even a skipped one, and its next state.

    Args:
      optimizer: the outermost optimizer.
      grads: float32 or higher precision; scaled if there is a loss scale, a tuple under a `PerLossScale`.
      finite: bool scalar, True if all gradients of the step are finite.
      opt_state: the optimizer's state.
      params: arrays, which keep their dtypes.
      on_addition: see `proposed_params`.
      **extra_args: extra arguments of `optimizer.update`.

    Example:
      >>> sgd, params = optax.sgd(0.5), jnp.ones(2, jnp.bfloat16)
      >>> optimizer_step(sgd, jnp.ones(2), jnp.array(True), sgd.init(params), params)[0]
      Array([0.5, 0.5], dtype=bfloat16)
    """
    if not (isinstance(optimizer, ParamsOptimizer) or scaled_states(opt_state)):
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, params)  # as plain optax requires
    grads = _nan_unless(finite, grads, opt_state)
    params, new_state = proposed_params(optimizer, grads, opt_state, params, on_addition, **extra_args)
    return params, _with_cleared_accumulators(kept_if_skipped(new_state, opt_state))


def _nan_unless(finite: jax.Array, grads: Grads, opt_state: OptState) -> Any:
    """Returns gradients that are all NaN if one is not finite, for a loss scale that sees only a part of them.

    A `with_loss_scale` within `multi_transform` sees only the gradients of its own parameters, but must skip if those
    of frozen ones overflow.
    """
    if not has_nested_scale(opt_state):
        return grads
    if isinstance(loss_scale_of(opt_state), PerLossScale):
        return grads  # each loss's own gradients show which one overflowed
    return jax.tree.map(lambda g: jnp.where(finite, g, jnp.nan), grads)


def _with_cleared_accumulators(opt_state: OptState) -> Any:
    """Returns an optimizer state in which a `MultiSteps` that has just emitted its gradients starts again from zero.

    optax 0.2.8 multiplies them by zero instead, which turns an infinity into a NaN that stays.
    """

    def clear(node: object) -> Any:
        if not isinstance(node, optax.MultiStepsState):
            return node
        emitted = node.mini_step == 0
        return node._replace(acc_grads=jax.tree.map(lambda g: jnp.where(emitted, jnp.zeros_like(g), g), node.acc_grads))

    return jax.tree.map(clear, opt_state, is_leaf=lambda x: isinstance(x, optax.MultiStepsState | LossScaledState))


_WRAPPERS: Any = StoringState, StateDtypesState  # they follow a skip themselves
_BRANCHING: Any = optax.MultiStepsState | optax.ApplyIfFiniteState  # their steps are in branches of the program


def check_nesting(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    **extra_args: object,
) -> None:
    """Raises ValueError if an optimizer's wrappers are nested in an order that changes the result.

    Args:
      optimizer: the outermost optimizer.
      grads: scaled gradients, arrays or tracers, as passed to it.
      opt_state: its state.
      params: the parameters.
      **extra_args: extra arguments of `optimizer.update`.

    Raises:
      ValueError: `apply_if_finite`, or a `MultiSteps` that skips, hides overflows from a `with_loss_scale`
        within; either is around one with a skip rule; something before `with_loss_scale` changes the gradients; some
        parameters' gradients reach none; or something follows `with_master_weights` or
        `with_stochastic_rounding`. The message has the right order.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale, with_loss_scale
      >>> scaled = with_loss_scale(optax.sgd(1.0), StaticLossScale(8.0))
      >>> optimizer, params = optax.chain(scaled, optax.scale(0.5)), jnp.ones(2)
      >>> check_nesting(optimizer, params, optimizer.init(params), params)  # the scale is half of the updates'
    """
    _check_skips_are_seen(opt_state)
    scales = has_nested_scale(opt_state) and not _is_in_branch(opt_state, LossScaledState)
    stores = not isinstance(optimizer, StoringOptimizer) and bool(find_nodes(opt_state, StoringState))
    stores = stores and not _is_in_branch(opt_state, StoringState)
    if not (scales or stores):
        return
    taken: set[int] = set()
    given: list[int] = []

    def update(grads: Grads) -> Any:
        with noted_updates() as passed, jax.disable_jit():  # a jitted update has tracers of its own
            updates, _ = optimizer.update(grads, opt_state, params, **extra_args)
        given.extend(_ids(grads))
        taken.update(_ids(passed.scaled))
        if scales and not taken <= {*given}:
            raise ValueError(
                "optimizer: a transformation before with_loss_scale changes the scaled gradients, such as clipping, "
                "weight decay or momentum; move it inside: with_loss_scale(optax.chain(..., optimizer), loss_scale)"
            )
        if stores and not {*_ids(passed.stored)} <= {*_ids(updates)}:
            raise ValueError(
                "optimizer: a transformation after with_master_weights or with_stochastic_rounding in the chain "
                "changes only the low-precision parameters; move it inside: with_master_weights(optax.chain(optimizer, "
                "...))"
            )
        return updates

    program = jax.make_jaxpr(update)(upcast_to_float32(grads))
    depend = _Depends().evaluate(program, [True] * len(given))
    paths = [path for path, _ in named_leaves(params)]
    missed = [path for path, x, depends in zip(paths, given, depend, strict=False) if depends and x not in taken]
    if scales and missed:
        raise ValueError(
            "optimizer: the gradients of these parameters are never unscaled; put with_loss_scale outside: "
            "with_loss_scale(optax.multi_transform(...), loss_scale)\n  " + "\n  ".join(missed)
        )


def _ids(tree: PyTree) -> list[int]:
    return [id(x) for x in jax.tree_util.tree_leaves(tree)]


def has_nested_scale(opt_state: OptState) -> bool:
    """Returns whether a `with_loss_scale` is within something other than a wrapper that stores parameters or state."""
    within: Any = opt_state
    while isinstance(within, _WRAPPERS):
        within = within.inner_state
    return not isinstance(within, LossScaledState) and bool(scaled_states(opt_state))


def kept_if_skipped(new: OptState, old: OptState) -> Any:
    """Returns the next state of an optimizer, in which a skipped step has changed nothing around `with_loss_scale`.

    optax's transformations after it, or around it, count skipped steps and let their moments decay.

    Args:
      new: the state after a step that was taken or skipped.
      old: the state before.
    """
    if not has_nested_scale(new) or _is_in_branch(new, LossScaledState):
        return new
    taken = scaled_states(new)[0][1].last_taken

    def kept(path: KeyPath, x: Any, y: Any) -> Any:
        if isinstance(x, LossScaledState):
            return x
        if isinstance(x, _WRAPPERS):
            return x._replace(inner_state=around(x.inner_state, y.inner_state))
        return select_leaf(path, taken, x, y)

    def around(new: OptState, old: OptState) -> Any:
        return jax.tree_util.tree_map_with_path(
            kept, new, old, is_leaf=lambda node: isinstance(node, (LossScaledState, *_WRAPPERS))
        )

    return around(new, old)


def _is_in_branch(opt_state: OptState, kind: type) -> bool:
    """Returns whether states of a type may be within a combinator that steps in a branch of the program."""
    return bool(find_nodes(change_nodes(opt_state, kind, lambda _: None), _BRANCHING))


def _check_skips_are_seen(opt_state: OptState) -> None:
    for path, node in find_nodes(opt_state, _BRANCHING):
        is_multi_steps = isinstance(node, optax.MultiStepsState)
        name = "MultiSteps(should_skip_update_fn=...)" if is_multi_steps else "apply_if_finite"
        skips = not is_multi_steps or bool(jax.tree_util.tree_leaves(node.skip_state))
        _check_skips_are_seen(tuple(node))
        if find_nodes(tuple(node), SkipRuleState):
            raise ValueError(
                f"optimizer: {name.split('(')[0]}, at {path or 'the outermost place'!r} of its state, wraps a "
                "with_loss_scale whose skip rule would miss steps; put with_loss_scale outside: "
                f"with_loss_scale(optax.{name.split('(')[0]}(optimizer, ...), loss_scale, skip=...)"
            )
        if skips and scaled_states(tuple(node)):
            raise ValueError(
                f"optimizer: {name}, at {path or 'the outermost place'!r} of its state, drops gradients that "
                "overflowed before with_loss_scale sees them, so the scale never decreases; put with_loss_scale "
                "outside, it skips such steps itself"
            )


class _Depends(Reading[bool]):
    """Finds the values that depend on the gradients, other than through `with_loss_scale`."""

    table = INLINED

    def constant(self, array: Any) -> bool:
        return False

    def literal(self, atom: Any) -> bool:
        return False

    def bind(self, equation: Any, inputs: list[bool]) -> list[bool]:
        return [any(inputs)] * len(equation.outvars)
