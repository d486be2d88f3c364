"""Optimizers that return the next parameters in their stored dtypes, not only differences.

optax's updates are differences, which `apply_updates` adds. Where parameters are stored in half precision
their next value is known, and the way over a difference can lose its last bits.
"""

import abc
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.pytrees import Reached, find_nodes, upcast_to_float32
from jmp_train.policies.types import Grads, OptState, Params


class Addition(NamedTuple):
    """The addition by which an optimizer steps, for those who look at what it loses.

    Attributes:
      params: the parameters before it, in the dtypes in which they are kept: master weights where there are some, and
        float32 where the sum is rounded stochastically.
      updates: what is added; of a step that is skipped they may be NaN.
      new_params: the sum, in the parameters' dtypes.
    """

    params: Any
    updates: Any
    new_params: Any


class ParamsOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer whose `update` can return the next parameters instead of updates.

    `with_loss_scale`, `with_state_dtypes` and the `StoringOptimizer`s return one. Its `update` takes the
    extra argument `return_params=False`; True makes it return `(new_params, state)`, the parameters in the
    dtypes that they came in. An outermost loss scale leaves the selection to the caller then, who has more to
    select: of a step that it skips, of which `state.last_taken` tells, they may be NaN. With it goes the extra
    argument `on_addition`, a function that is called once with the `Addition`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import with_master_weights
      >>> optimizer, params = with_master_weights(optax.sgd(0.5)), jnp.ones(2, jnp.float16)
      >>> optimizer.update(params, optimizer.init(params), params, return_params=True)[0]
      Array([0.5, 0.5], dtype=float16)
    """


class StoringOptimizer(ParamsOptimizer):
    """A `ParamsOptimizer` that decides how parameters are stored, and so goes outermost.

    `with_master_weights`, `with_stochastic_rounding` and `with_kahan` return one.

    Example:
      >>> import optax
      >>> from jmp_train.policies import with_master_weights
      >>> isinstance(with_master_weights(optax.sgd(0.1)), StoringOptimizer)
      True
    """


class StoringState(abc.ABC):
    """What a `StoringOptimizer` keeps: the states of ours are registered as it."""

    @property
    @abc.abstractmethod
    def inner_state(self) -> Any:
        """The wrapped optimizer's state."""


def refuse_stored(inner_state: OptState) -> None:
    """Raises ValueError if the optimizer within another `StoringOptimizer` is one.

    Args:
      inner_state: its first state.
    """
    if find_nodes(inner_state, StoringState):
        raise ValueError(
            "optimizer stores the parameters already: take with_master_weights, with_stochastic_rounding or "
            "with_kahan, and once"
        )


def storing_optimizer(init: optax.TransformInitFn, step: Callable[..., tuple[Any, Any]]) -> StoringOptimizer:
    """Returns the optimizer with that `init` whose `update` goes where `step` goes.

    Args:
      init: the optimizer's.
      step: `step(updates, state, params, **extra_args) -> (new_params, new_state)`.
    """

    def update(
        updates: Grads,
        state: object,
        params: Params | None = None,
        *,
        return_params: bool = False,
        **extra_args: object,
    ) -> tuple[Any, Any]:
        if params is None:
            raise ValueError("params must be given: update(updates, state, params)")
        if isinstance(state, Reached):
            return updates, Reached(updates)
        new_params, state = step(updates, state, params, **extra_args)
        if return_params:
            return new_params, state
        return jax.tree_util.tree_map(difference, new_params, params), state

    return StoringOptimizer(init, update)


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the update, float32 or higher, by which `optax.apply_updates` makes a new parameter of the old one."""
    # x + -0.0 is x for every x: what does not change keeps its bits, an inf and a -0.0 too.
    new_float32, old_float32 = upcast_to_float32((new, old))
    return jnp.where(new == old, -jnp.zeros_like(new_float32), new_float32 - old_float32)


def add_updates(params: Params, updates: Grads, on_addition: Callable[[Addition], None] | None = None) -> Any:
    """Returns parameters in their own dtypes after updates, which are added in float32 or higher precision.

    Args:
      params: arrays.
      updates: of an optimizer.
      on_addition: called with the addition, if given.
    """
    updated = optax.apply_updates(*upcast_to_float32((params, updates)))
    new_params = jax.tree_util.tree_map(lambda new, old: new.astype(old.dtype), updated, params)
    if on_addition is not None:
        on_addition(Addition(params, updates, new_params))
    return new_params


def as_transformation(optimizer: object) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments; raises TypeError if it is not an optimizer."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be an optax.GradientTransformation, got {optimizer!r}")
    return optax.with_extra_args_support(optimizer)
