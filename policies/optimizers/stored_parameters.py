"""Optimizers that say what the parameters become, in the dtypes in which these are stored.

optax's updates are differences, which `apply_updates` adds. Where parameters are stored in half precision
their next value is known, and the way over a difference can lose its last bits.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.casting import widen_to_float32
from jmp_train.policies.nodes import Reached


class StepFn(Protocol):
    """Makes the next parameters and state of gradients, state and parameters."""

    def __call__(self, updates: Any, state: Any, params: Any, **extra_args: Any) -> tuple[Any, Any]:
        """Returns `(new_params, new_state)`."""
        ...


class StoringOptimizer(optax.GradientTransformationExtraArgs):
    """What `with_master_weights` and `with_stochastic_rounding` return: an optax optimizer with a `step`.

    `step` takes the arguments of `update` and returns `(new_params, state)`, the parameters in the dtypes
    that they came in. `train_step` calls it; `update` gives the difference for everybody else.

    Example:
      >>> import optax
      >>> from jmp_train.policies import with_master_weights
      >>> isinstance(with_master_weights(optax.sgd(0.1)), StoringOptimizer)
      True
    """

    step: StepFn


class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`.

    Attributes:
      key: the jax random key of the next step's rounding.
      inner_state: the wrapped optimizer's state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from jmp_train.policies import with_stochastic_rounding
      >>> optimizer = with_stochastic_rounding(optax.sgd(0.1), jax.random.key(0))
      >>> optimizer.init(jnp.ones(2, jnp.bfloat16)).key == jax.random.key(0)
      Array(True, dtype=bool)
    """

    key: Any
    inner_state: Any


def storing_optimizer(init: optax.TransformInitFn, step: StepFn) -> StoringOptimizer:
    """Returns the optimizer with that `init` and `step`."""

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("params must be given: update(updates, state, params)")
        if isinstance(state, Reached):
            return updates, Reached(updates)
        new_params, state = step(updates, state, params, **extra_args)
        return jax.tree_util.tree_map(_difference, new_params, params), state

    optimizer = StoringOptimizer(init, update)
    optimizer.step = step
    return optimizer


def _difference(new: jax.Array, old: jax.Array) -> jax.Array:
    # x + -0.0 is x for every x: what does not change keeps its bits, an inf and a -0.0 too.
    new_wide, old_wide = widen_to_float32((new, old))
    return jnp.where(new == old, -jnp.zeros_like(new_wide), new_wide - old_wide)
