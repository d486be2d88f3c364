"""Counts zero gradients, which show that a loss scale is too low or that layers do not learn."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.optimizers.stored_parameters import as_transformation
from jmp_train.policies.types import Grads, Params


class ZeroGradientsState(NamedTuple):
    """State of `count_zero_gradients`.

    Attributes:
      zeros: int32 scalar, number of zero elements in the gradients of the last step taken.
      inner_state: the wrapped optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> int(count_zero_gradients(optax.sgd(0.1)).init(jnp.ones(2)).zeros)
      0
    """

    zeros: jax.Array
    inner_state: Any


def count_zero_gradients(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that counts the zeros in its gradients.

    Inside of `with_loss_scale` these are unscaled and float32, and `train_step` reports the count among its
    metrics as `num_zeros_in_grad`. A skipped step counts nothing and keeps the last number.

    Args:
      optimizer: any optax optimizer.

    Returns:
      An optimizer whose state is a `ZeroGradientsState`.

    Raises:
      TypeError: `optimizer` is not an optax optimizer.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = count_zero_gradients(optax.sgd(0.1))
      >>> params = jnp.ones(3)
      >>> _, state = optimizer.update(jnp.array([0.0, 1.0, 0.0]), optimizer.init(params), params)
      >>> int(state.zeros)
      2

    Reference: `log_num_zeros_in_grad` of Megatron-LM and ColossalAI.
    """
    inner = as_transformation(optimizer)

    def init(params: Params) -> ZeroGradientsState:
        return ZeroGradientsState(jnp.zeros((), jnp.int32), inner.init(params))

    def update(
        updates: Grads, state: Any, params: Params | None = None, **extra_args: object
    ) -> tuple[Any, ZeroGradientsState]:
        counts = [(g == 0).sum(dtype=jnp.int32) for g in jax.tree_util.tree_leaves(updates)]
        zeros = functools.reduce(jnp.add, counts, jnp.int32(0))
        new_updates, inner_state = inner.update(updates, state.inner_state, params, **extra_args)
        return new_updates, ZeroGradientsState(zeros, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)
