"""`with_master_weights` stores float32 master weights of half-precision parameters in the optimizer state.

Adding an update of less than 1/2048 of a float16 parameter (1/256 of a bfloat16 one) does not change the parameter. So
the optimizer updates a float32 copy, and the stored parameters are its rounded values.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from jmp_train.policies.optimizers.stored_parameters import (
    Addition,
    StoringOptimizer,
    StoringState,
    as_transformation,
    next_params,
    storing_optimizer,
)
from jmp_train.policies.pytrees import (
    find_nodes,
    only_state,
    path_name,
    refuse_overwritten,
    upcast_to_float32,
    with_states,
)
from jmp_train.policies.types import Grads, Params, PyTree


class MasterWeightsState(NamedTuple):
    """The state of `with_master_weights`.

    Attributes:
      master_weights: the parameters in float32, or in their own higher precision, which the optimizer updates.
      inner_state: the wrapped optimizer's state.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = with_master_weights(optax.sgd(0.1)).init({"w": jnp.ones(2, jnp.float16)})
      >>> state.master_weights["w"].dtype.name
      'float32'
    """

    master_weights: Any
    inner_state: Any


StoringState.register(MasterWeightsState)


def with_master_weights(optimizer: optax.GradientTransformation | optax.MultiSteps) -> StoringOptimizer:
    """Returns an optimizer that updates float32 master weights of half-precision parameters.

    It must be the outermost wrapper: `with_master_weights(with_loss_scale(optimizer, loss_scale))`. After each step,
    the parameters are the master weights rounded to the stored dtypes. In `train_step` they are bitwise equal. With
    `optax.apply_updates`, they agree to one part in 2**24 of their old values, if these were finite.

    The initial master weights are the parameters passed to `init`.
    `TrainState.create(params, optimizer, cast_params=...)` passes them before the cast, so float32 parameters lose
    nothing. If `init` gets half-precision parameters, as in Apex, the master weights are these rounded values.

    Args:
      optimizer: any optax optimizer, including `with_loss_scale`.

    Returns:
      An optimizer whose state is a `MasterWeightsState`, and whose `update` needs the parameters.

    Raises:
      TypeError: `optimizer` is not an optax optimizer.
      ValueError: at `init`, the optimizer already has master weights or rounds stochastically; when called, `update`
        gets no parameters.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = with_master_weights(optax.sgd(1.0))
      >>> params = jnp.ones((), jnp.float16)
      >>> state = optimizer.init(params)
      >>> for _ in range(4):  # a float16 next to 1 is 2**-11 away, or 2**-10
      ...     params, state = optimizer.update(jnp.float32(2.0**-13), state, params, return_params=True)
      >>> float(1 - params) == 2.0**-11, float(1 - get_master_weights(state)) == 2.0**-11
      (True, True)

    Reference: Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740; Apex's
    `master_weights`.
    """
    inner = as_transformation(optimizer)

    def init(params: Params) -> MasterWeightsState:
        refuse_overwritten(params)
        # A copy, so that parameters and state can be donated together.
        master_weights = jax.tree_util.tree_map(_apart_from, upcast_to_float32(params), params)
        inner_state = inner.init(master_weights)
        for _, stored in find_nodes(inner_state, StoringState):
            if isinstance(stored, MasterWeightsState):
                raise ValueError("optimizer already has master weights; call with_master_weights once")
            raise ValueError(
                "with_stochastic_rounding has no effect on float32 master weights; use with_master_weights or "
                "with_stochastic_rounding, not both"
            )
        return MasterWeightsState(master_weights, inner_state)

    def step(
        updates: Grads,
        state: MasterWeightsState,
        params: Params,
        on_addition: Callable[[Addition], None] | None = None,
        **extra_args: object,
    ) -> tuple[Any, MasterWeightsState]:
        master_weights, inner_state = next_params(
            inner, upcast_to_float32(updates), state.inner_state, state.master_weights, on_addition, **extra_args
        )
        new_params = jax.tree_util.tree_map(
            lambda weight, x: _apart_from(weight.astype(x.dtype), weight), master_weights, params
        )
        return new_params, MasterWeightsState(master_weights, inner_state)

    return storing_optimizer(init, step)


def _apart_from(x: jax.Array, original: jax.Array) -> Any:
    return jnp.copy(x) if x is original else x


def get_master_weights(opt_state: PyTree) -> Any:
    """Returns the float32 master weights in an optimizer state, to save and export.

    Args:
      opt_state: a state with one `MasterWeightsState` in it, in any nesting of optax's combinators.

    Returns:
      A tree like the parameters, in float32.

    Raises:
      ValueError: there is no such state, or there are several; the message lists their paths.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> optimizer = with_master_weights(optax.adam(1e-3))
      >>> get_master_weights(optimizer.init({"w": jnp.ones(2, jnp.bfloat16)}))["w"].dtype.name
      'float32'

    Reference: Apex's `amp.master_params(optimizer)`.
    """
    return _only_state(opt_state).master_weights


def set_master_weights(opt_state: PyTree, params: Params) -> Any:
    """Returns a copy of an optimizer state with new master weights, for parameters from another source.

    If only the parameters are replaced, the next step sets them to the master weights again.

    Args:
      opt_state: a state with one `MasterWeightsState` in it, in any nesting of optax's combinators.
      params: pytree like the master weights, of any floating dtypes.

    Returns:
      The same state, except for the master weights.

    Raises:
      ValueError: `params` has another structure, or a leaf has another shape (the message names it), or there are no
        master weights or several.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> state = with_master_weights(optax.sgd(0.1)).init(jnp.ones(2, jnp.float16))
      >>> get_master_weights(set_master_weights(state, jnp.zeros(2, jnp.float16)))
      Array([0., 0.], dtype=float32)
    """
    old = _only_state(opt_state).master_weights
    structures = [jax.tree_util.tree_structure(tree) for tree in (params, old)]
    if structures[0] != structures[1]:
        raise ValueError(f"params must have the structure of the master weights, {structures[1]}, got {structures[0]}")

    def like(path: KeyPath, x: jax.Array, weight: jax.Array) -> Any:
        if jnp.shape(x) != jnp.shape(weight):
            raise ValueError(
                f"params {path_name(path)!r} has shape {jnp.shape(x)}, but its master weight has shape "
                f"{jnp.shape(weight)}"
            )
        return jnp.array(x, weight.dtype)

    new = jax.tree_util.tree_map_with_path(like, params, old)
    return with_states(opt_state, MasterWeightsState, lambda state: state._replace(master_weights=new))


def _only_state(opt_state: PyTree) -> MasterWeightsState:
    return only_state(opt_state, MasterWeightsState, "master_weights", "sets of master weights", "with_master_weights")
