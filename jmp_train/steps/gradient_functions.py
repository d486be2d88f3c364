"""Gradient functions: the part of a train step before the optimizer.

A gradient function has the signature `(loss_scale, params, model_state, batch, rng) -> StepGradients`. A transform
takes one and returns another, and a step chains them:

    gradients = loss_gradients(loss_fn, policy)
    gradients = accumulated(gradients, 4)
    gradients = over_axes(gradients, ("data",))
"""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax

from jmp_train.policies import Params
from jmp_train.policies.loss_scaling import LossScales
from jmp_train.types import Batch, ModelState

# loss_fn(params, model_state, batch, rng) -> (loss, (model_state, aux)); users write more specific types
LossFn: TypeAlias = Callable[[Any, Any, Any, Any], tuple[jax.Array, tuple[Any, Any]]]


class StepGradients(NamedTuple):
    """Loss, gradients and model state of one batch, before the optimizer update.

    Attributes:
      loss: scalar, unscaled.
      model_state: the next model state.
      aux: further results of the loss function, for the metrics.
      grads: scaled gradients, in float32 or higher precision; a tuple of them under a `PerLossScale`.

    Example:
      >>> result = StepGradients(loss=0.5, model_state=None, aux=None, grads={"w": 2.0})
      >>> result._replace(grads=jax.tree.map(lambda g: 0.5 * g, result.grads)).grads
      {'w': 1.0}
    """

    loss: jax.Array
    model_state: Any
    aux: Any
    grads: Any


GradientFunction: TypeAlias = Callable[[LossScales, Params, ModelState, Batch, jax.Array | None], StepGradients]
GradientTransform: TypeAlias = Callable[[GradientFunction], GradientFunction]
