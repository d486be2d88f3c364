"""`stateless`: adapts a plain loss function to a train step."""

from collections.abc import Callable
from typing import Any

import jax

from jmp_train.policies import Params
from jmp_train.policies.autocasting import missing_key_explained
from jmp_train.policies.loss_scaling import check_is_stateless, loss_and_aux, only_losses
from jmp_train.steps.gradient_functions import LossFn
from jmp_train.types import Batch, ModelState

_STATELESS = (
    "stateless is for a loss_fn that draws nothing; train_step gives a key to loss_fn(params, model_state, batch, rng)"
)


def stateless(loss_fn: Callable[..., Any], has_aux: bool | None = None) -> LossFn:
    """Adapts a plain loss function to `train_step`.

    Args:
      loss_fn: `loss_fn(params, batch) -> loss`, or `-> (loss, aux)`. `loss` may be a tuple of losses.
      has_aux: True if `loss_fn` returns `(loss, aux)`. Required if it returns two scalars and the optimizer has no
        `PerLossScale`: False if both are losses.

    Returns:
      `fn(params, model_state, batch, rng) -> (loss, (model_state, aux))`, which returns the model state unchanged
      and draws nothing.

    Raises:
      TypeError: `loss_fn` cannot take two arguments; when called, a part of its result is not a loss, and `has_aux` is
        not set.

    Example:
      >>> import jax.numpy as jnp
      >>> fn = stateless(lambda params, batch: (params * batch).sum())
      >>> loss, (model_state, aux) = fn(jnp.ones(2), None, jnp.ones(2), None)
      >>> float(loss), aux
      (2.0, None)
    """
    check_is_stateless(loss_fn)

    def with_state(
        params: Params, model_state: ModelState, batch: Batch, rng: jax.Array | None
    ) -> tuple[jax.Array, tuple[Any, Any]]:
        del rng
        with missing_key_explained(lambda: _STATELESS, is_last_word=True):
            result = loss_fn(params, batch)
        loss, aux = loss_and_aux(result, True) if has_aux else (only_losses(result, has_aux), None)
        return loss, (model_state, aux)

    with_state.__qualname__ = getattr(loss_fn, "__qualname__", type(loss_fn).__name__)  # for messages
    return with_state
