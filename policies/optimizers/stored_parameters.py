"""Optimizers that return the next parameters in their stored dtypes instead of differences, and their steps.

optax's updates are differences, which `apply_updates` adds. For parameters stored in half precision,
the next value is known, and a difference can lose its last bits.

While `check_nesting` traces a step, wrappers note the updates that pass through them. optax's combinators are closures,
and so are users' own: nobody can ask them for the optimizers that they hold.
"""

import abc
import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.optimizers.loss_scaled_state import scaled_states
from jmp_train.policies.pytrees import find_nodes, select_tree, upcast_to_float32
from jmp_train.policies.types import Grads, OptState, Params


class Addition(NamedTuple):
    """The addition that an optimizer makes in a step, to measure its rounding error.

    Attributes:
      params: the parameters before it, in the dtypes of the addition: master weights if there are any, and
        float32 if the sum is rounded stochastically.
      updates: the updates; for a skipped step they may be NaN.
      new_params: the sum, in the parameters' dtypes.
    """

    params: Any
    updates: Any
    new_params: Any


class ParamsOptimizer(optax.GradientTransformationExtraArgs):
    """An optax optimizer whose `update` can return the next parameters instead of updates.

    `with_loss_scale`, `with_state_dtypes` and the `StoringOptimizer`s return one. Its `update` takes the
    extra argument `return_params=False`; with True it returns `(new_params, state)`, with parameters in their
    own dtypes. An outermost loss scale then leaves the selection to the caller, who selects other values too:
    the parameters of a skipped step, see `state.last_taken`, may be NaN. The extra
    argument `on_addition` is a function that is called once with the `Addition`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import with_master_weights
      >>> optimizer, params = with_master_weights(optax.sgd(0.5)), jnp.ones(2, jnp.float16)
      >>> optimizer.update(params, optimizer.init(params), params, return_params=True)[0]
      Array([0.5, 0.5], dtype=float16)
    """


class StoringOptimizer(ParamsOptimizer):
    """A `ParamsOptimizer` that determines how parameters are stored, and so goes outermost.

    `with_master_weights`, `with_stochastic_rounding` and `with_kahan` return one.

    Example:
      >>> import optax
      >>> from jmp_train.policies import with_master_weights
      >>> isinstance(with_master_weights(optax.sgd(0.1)), StoringOptimizer)
      True
    """


class StoringState(abc.ABC):
    """The interface of a `StoringOptimizer`'s state; the library's own states are registered as it."""

    @property
    @abc.abstractmethod
    def inner_state(self) -> Any:
        """The wrapped optimizer's state."""


def refuse_stored(inner_state: OptState) -> None:
    """Raises ValueError if the optimizer within a `StoringOptimizer` is another one.

    Args:
      inner_state: its first state.
    """
    if find_nodes(inner_state, StoringState):
        raise ValueError(
            "optimizer already stores the parameters; use only one of with_master_weights, with_stochastic_rounding "
            "and with_kahan"
        )


def storing_optimizer(init: optax.TransformInitFn, step: Callable[..., tuple[Any, Any]]) -> StoringOptimizer:
    """Returns an optimizer with this `init`, whose `update` returns the parameters of `step` or the difference.

    Args:
      init: the `init` of the optimizer.
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
        new_params, state = step(updates, state, params, **extra_args)
        if return_params:
            return new_params, state
        differences = jax.tree_util.tree_map(difference, new_params, params)
        note_stored(differences)
        return differences, state

    return StoringOptimizer(init, update)


def difference(new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the update, float32 or higher, with which `optax.apply_updates` turns the old parameter into the new."""
    # x + -0.0 is x for every x, so unchanged values keep their bits, including inf and -0.0.
    new_float32, old_float32 = upcast_to_float32((new, old))
    return jnp.where(new == old, -jnp.zeros_like(new_float32), new_float32 - old_float32)


def add_updates(params: Params, updates: Grads, on_addition: Callable[[Addition], None] | None = None) -> Any:
    """Returns parameters in their own dtypes after updates, which are added in float32 or higher precision.

    Args:
      params: arrays.
      updates: an optimizer's updates.
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


def proposed_params(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    on_addition: Callable[[Addition], None] | None = None,
    **extra_args: object,
) -> tuple[Any, Any]:
    """Returns the parameters after an optimizer's step, even a skipped one, and its next state.

    Args:
      optimizer: any optimizer; a `ParamsOptimizer` computes the next parameters itself.
      grads: gradients for `optimizer.update`.
      opt_state: the optimizer's state.
      params: arrays, which keep their dtypes.
      on_addition: if given, called once with the optimizer's addition to the parameters.
      **extra_args: extra arguments of `optimizer.update`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> sgd, params = optax.sgd(0.5), jnp.ones(2)
      >>> proposed_params(sgd, jnp.ones(2), sgd.init(params), params)[0]
      Array([0.5, 0.5], dtype=float32)
    """
    if isinstance(optimizer, ParamsOptimizer):
        if on_addition is not None:
            extra_args["on_addition"] = on_addition
        return optimizer.update(grads, opt_state, params, return_params=True, **extra_args)
    updates, opt_state = optimizer.update(grads, opt_state, params, **extra_args)
    return add_updates(params, updates, on_addition), opt_state


def next_params(
    optimizer: optax.GradientTransformationExtraArgs,
    grads: Grads,
    opt_state: OptState,
    params: Params,
    on_addition: Callable[[Addition], None] | None = None,
    **extra_args: object,
) -> tuple[Any, Any]:
    """Returns the result of `proposed_params`, but with the old parameters if the step is skipped.

    Args:
      optimizer: see `proposed_params`.
      grads: gradients, scaled if there is a loss scale.
      opt_state: a state; its loss scale, if any, decides about a skip.
      params: arrays.
      on_addition: see `proposed_params`.
      **extra_args: extra arguments of `optimizer.update`.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import NoOpLossScale, with_loss_scale
      >>> optimizer, params = with_loss_scale(optax.sgd(0.5), NoOpLossScale()), jnp.ones(2)
      >>> state = optimizer.init(params)
      >>> next_params(optimizer, jnp.array([1.0, jnp.inf]), state, params)[0]
      Array([1., 1.], dtype=float32)
    """
    new_params, opt_state = proposed_params(optimizer, grads, opt_state, params, on_addition, **extra_args)
    # Nested loss scales have set their updates to zero already, but others may have changed them since.
    for _, scaled in scaled_states(opt_state):
        new_params = select_tree(scaled.last_taken, new_params, params)
    return new_params, opt_state


class Passed(NamedTuple):
    """The gradients and updates that passed through wrappers of an optimizer.

    Attributes:
      scaled: the scaled gradients that each `with_loss_scale` took.
      stored: the updates that each `StoringOptimizer` returned.
    """

    scaled: list[Any]
    stored: list[Any]


_PASSED: ContextVar[Passed | None] = ContextVar("passed updates", default=None)


@contextlib.contextmanager
def noted_updates() -> Iterator[Passed]:
    """Yields the notes of the wrappers called within this context, where `with_loss_scale` returns zeros."""
    passed = Passed([], [])
    token = _PASSED.set(passed)
    try:
        yield passed
    finally:
        _PASSED.reset(token)


def noting_scaled(update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `update` of a `with_loss_scale`, extended to record the gradients that it takes."""

    @functools.wraps(update)
    def noting(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if (passed := _PASSED.get()) is None:
            return update(updates, state, params, **extra_args)
        passed.scaled.append(updates)
        return jax.tree_util.tree_map(jnp.zeros_like, params), state

    return noting


def note_stored(updates: Any) -> None:
    """Notes the updates that a `StoringOptimizer` returns."""
    if (passed := _PASSED.get()) is not None:
        passed.stored.append(updates)
