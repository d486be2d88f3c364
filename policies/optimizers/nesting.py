"""Checks that each of nested optimizer wrappers gets the gradients and updates that it needs.

optax's combinators do not know the optimizers that they combine, and `init` only gets parameters. So the check traces
`update` with a marker in place of the wrapper's state, and reads from the program how a combinator changes
the gradients before `with_loss_scale`, or the updates after `with_master_weights`.
"""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax
from jax.extend.core import Jaxpr

from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState, scaled_states
from jmp_train.policies.optimizers.skip_rules import SkipRuleState
from jmp_train.policies.optimizers.state_dtypes import StateDtypesState
from jmp_train.policies.optimizers.stored_parameters import StoringOptimizer, StoringState
from jmp_train.policies.programs import INLINED, Reading
from jmp_train.policies.pytrees import Reached, change_nodes, find_nodes, named_leaves
from jmp_train.policies.types import Grads, OptState, Params

_GIVEN = frozenset(["scaled", "other"])
# Linear in all of their operands together, and in each of them.
_TERMS = frozenset(
    [
        "add", "add_any", "all_gather", "concatenate", "convert_element_type", "copy",
        "copy_p", "cumsum", "expand_dims", "neg", "optimization_barrier", "pcast", "psum",
        "psum_invariant", "pvary", "real", "imag", "reduce_precision", "reduce_scatter",
        "reduce_sum", "reshape", "rev", "sharding_constraint", "slice", "split", "squeeze",
        "sub", "transpose",
    ]
)  # fmt: skip
_FACTORS = frozenset(["mul", "dot_general", "conv_general_dilated"])
_CONTROL = frozenset(["cond", "while", "scan", "shard_map"])

_BRANCHING: Any = optax.MultiStepsState | optax.ApplyIfFiniteState


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
        within; either is around one with a skip rule; a part of a chain before `with_loss_scale` is not linear in
        the gradients; some parameters' gradients reach none; or something follows `with_master_weights` or
        `with_stochastic_rounding`. The message has the right order.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale, with_loss_scale
      >>> scaled = with_loss_scale(optax.sgd(1.0), StaticLossScale(8.0))
      >>> optimizer, params = optax.chain(optax.scale(0.5), scaled), jnp.ones(2)
      >>> check_nesting(optimizer, params, optimizer.init(params), params)  # half of them is in order
    """
    _check_skips_are_seen(opt_state)

    def program(kind: type) -> Any:
        """Returns the program up to the updates, and up to the wrappers' inputs, or None if it cannot be traced."""
        marked = change_nodes(opt_state, kind, lambda _: Reached(()))
        if find_nodes(marked, _BRANCHING):
            return None  # its branches must have states of one type, which excludes a marker

        def reached(grads: Grads) -> tuple[Any, Any]:
            updates, after = optimizer.update(grads, marked, params, **extra_args)
            return updates, [node.updates for _, node in find_nodes(after, Reached)]

        return jax.make_jaxpr(reached)(grads).jaxpr

    _check_before_scale(optimizer, opt_state, params, program)
    _check_after_storing(optimizer, opt_state, params, program)


def has_nested_scale(opt_state: OptState) -> bool:
    """Returns whether a `with_loss_scale` is within something other than a wrapper that stores parameters or state."""
    within = opt_state
    while isinstance(within, StoringState | StateDtypesState):
        within = within.inner_state
    return not isinstance(within, LossScaledState) and bool(scaled_states(opt_state))


def _check_before_scale(optimizer: object, opt_state: OptState, params: Params, program: Callable[[Any], Any]) -> None:
    if not has_nested_scale(opt_state):
        return
    traced = program(LossScaledState)
    if traced is None:
        return
    kinds = _kinds(traced, ["scaled"] * len(traced.invars))
    paths = [path for path, _ in named_leaves(params)]
    if "other" in kinds[len(paths) :]:
        raise ValueError(
            "optimizer: a transformation before with_loss_scale in the chain is not linear, such as clipping, weight "
            "decay or momentum, and would see scaled gradients; move it inside: with_loss_scale(optax.chain(..., "
            "optimizer), loss_scale)"
        )
    passed = [path for path, kind in zip(paths, kinds, strict=False) if kind in _GIVEN]
    if passed and not isinstance(optimizer, StoringOptimizer):
        raise ValueError(
            "optimizer: the gradients of these parameters are never unscaled; put with_loss_scale outside: "
            "with_loss_scale(optax.multi_transform(...), loss_scale)\n  " + "\n  ".join(passed)
        )


def _check_after_storing(optimizer: object, opt_state: OptState, params: Params, program: Callable[[Any], Any]) -> None:
    if isinstance(optimizer, StoringOptimizer) or not find_nodes(opt_state, StoringState):
        return
    traced = program(StoringState)
    if traced is None:
        return
    count = len(jax.tree_util.tree_leaves(params))
    final, stored = traced.outvars[:count], traced.outvars[count:]
    if any(all(x is not y for y in final) for x in stored):
        raise ValueError(
            "optimizer: a transformation after with_master_weights or with_stochastic_rounding in the chain changes "
            "only the low-precision parameters; move it inside: with_master_weights(optax.chain(optimizer, ...))"
        )


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


def _kinds(jaxpr: Jaxpr, inputs: list[str]) -> list[str]:
    """Returns the kind of each result of a program, given the kinds of its inputs.

    "scaled" is proportional to the gradients, "other" is computed from them in another way, "zero" is
    always zero, "free" does not depend on them.
    """
    return _Kinds().evaluate(jaxpr, inputs)


class _Kinds(Reading[str]):
    table = INLINED

    def constant(self, array: Any) -> str:
        return "free"

    def literal(self, atom: Any) -> str:
        return "zero" if np.all(atom.val == 0) else "free"

    def bind(self, equation: Any, inputs: list[str]) -> list[str]:
        return [_kind(equation.primitive.name, inputs)] * len(equation.outvars)


def _kind(name: str, given: list[str]) -> str:
    """Returns the kind of an operation's result, given the kinds of its operands."""
    if name == "broadcast_in_dim":
        return given[0]
    if not _GIVEN.intersection(given):
        return "free"
    if "other" in given:
        return "other"
    scaled = [kind == "scaled" for kind in given]
    linear = {
        "select_n": not scaled[0] and "free" not in given[1:],
        "div": scaled == [True, False],
        "dynamic_slice": scaled[0],
        "gather": scaled[0],
        "pad": scaled[0],
        # Loops and branches are not analyzed: their results count as valid.
        **dict.fromkeys(_CONTROL, True),
        **dict.fromkeys(_FACTORS, sum(scaled) == 1),
        **dict.fromkeys(_TERMS, "free" not in given),
    }
    return "scaled" if linear.get(name, False) else "other"
