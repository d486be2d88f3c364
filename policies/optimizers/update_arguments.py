"""Extra arguments of optimizers: the loss, the loss as a function of the parameters, its gradient.

optax passes extra arguments on to all optimizers that it combines, and few of them declare which they take. So the
types of their states decide.
"""

from collections.abc import Callable
from typing import Any

import jax
import optax
import optax.contrib

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
        return {
            "value": loss,
            "grad": grads,
            "value_fn": _loss_fn(_evaluated(evaluate, "a line search")),
        }
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
