"""One step of any optimizer: its extra arguments, the preparation of its gradients, the cleanup of its state.

optax passes extra arguments, such as the loss, on to all optimizers that it combines, and few of them declare which
they take. So the types of their states decide.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from jmp_train.policies.loss_scaling import PerLossScale
from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState, loss_scale_of, scaled_states
from jmp_train.policies.optimizers.nesting import has_nested_scale, kept_if_skipped
from jmp_train.policies.optimizers.stored_parameters import Addition, ParamsOptimizer, proposed_params
from jmp_train.policies.pytrees import find_nodes
from jmp_train.policies.types import Grads, OptState, Params

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
