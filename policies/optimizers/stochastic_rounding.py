"""bfloat16 parameters without master weights: stochastic rounding, by which small updates add up.

Rounding to the nearest always loses an update of less than 1/512 of the parameter. Stochastic rounding rounds up with
a probability equal to the lost fraction of a step, so the value is right on average, and half the bytes are saved.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.optimizers.loss_scaled_state import scaled_states
from jmp_train.policies.optimizers.stored_parameters import (
    Addition,
    StoringOptimizer,
    StoringState,
    as_transformation,
    next_params,
    refuse_stored,
    storing_optimizer,
)
from jmp_train.policies.pytrees import (
    check_choice,
    is_float_array,
    is_key,
    named_leaves,
    refuse_overwritten,
    select_tree,
    upcast_to_float32,
)
from jmp_train.policies.quantizing import round_to, split_in_two
from jmp_train.policies.types import Grads, Params, PyTree


class StochasticRoundingState(NamedTuple):
    """State of `with_stochastic_rounding`.

    Attributes:
      key: the jax random key of the next step's rounding.
      inner_state: the wrapped optimizer's state.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer = with_stochastic_rounding(optax.sgd(0.1), jax.random.key(0))
      >>> optimizer.init(jnp.ones(2, jnp.bfloat16)).key == jax.random.key(0)
      Array(True, dtype=bool)
    """

    key: Any
    inner_state: Any


StoringState.register(StochasticRoundingState)


def with_stochastic_rounding(
    optimizer: optax.GradientTransformation | optax.MultiSteps, key: jax.Array
) -> StoringOptimizer:
    """Returns an optimizer that rounds bfloat16 parameters stochastically, without bias.

    It goes outermost, in place of `with_master_weights`. The optimizer sees float32, and its new parameters are rounded
    by `stochastic_round`. float32 parameters are stored unchanged. The same key gives the same run; a skipped step
    changes no parameter, but also uses a random key.

    Args:
      optimizer: any optax optimizer, including `with_loss_scale`.
      key: a jax random key, typed or of uint32; the same on all devices.

    Returns:
      An optimizer whose state is a `StochasticRoundingState`, and whose `update` needs the parameters.

    Raises:
      TypeError: `optimizer` is not an optax optimizer, or `key` not a random key; at `init`, parameters have flax's fp8
        scales among them.
      ValueError: at `init`, a parameter has another half type; the message names it. Or the optimizer has
        master weights, or rounds already.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> optimizer = with_stochastic_rounding(optax.sgd(1.0), jax.random.key(0))
      >>> params = jnp.ones(10_000, jnp.bfloat16)
      >>> state = optimizer.init(params)
      >>> for _ in range(8):  # plain rounding leaves 1 where it is
      ...     params, state = optimizer.update(
      ...         jnp.full(10_000, 2.0**-12), state, params, return_params=True
      ...     )
      >>> abs(float(params.astype(jnp.float32).mean()) - (1 - 8 * 2.0**-12)) < 1e-4
      True

    Reference: Gupta et al., "Deep Learning with Limited Numerical Precision", https://arxiv.org/abs/1502.02551.
    """
    inner = as_transformation(optimizer)
    check_key(key)

    def init(params: Params) -> StochasticRoundingState:
        refuse_overwritten(params)
        _check_dtypes(params)
        inner_state = inner.init(upcast_to_float32(params))
        refuse_stored(inner_state)
        return StochasticRoundingState(jnp.copy(key), inner_state)

    def step(
        updates: Grads,
        state: StochasticRoundingState,
        params: Params,
        on_addition: Callable[[Addition], None] | None = None,
        **extra_args: object,
    ) -> tuple[Any, StochasticRoundingState]:
        grads, float32_params = upcast_to_float32((updates, params))
        float32_params, inner_state = next_params(
            inner, grads, state.inner_state, float32_params, on_addition, **extra_args
        )
        next_key, step_key = jax.random.split(state.key)
        leaves, tree = jax.tree_util.tree_flatten(params)
        stored = [
            stochastic_round(x, jax.random.fold_in(step_key, index))
            if old.dtype == jnp.bfloat16
            else x.astype(old.dtype)
            for index, (x, old) in enumerate(zip(tree.flatten_up_to(float32_params), leaves, strict=True))
        ]
        return tree.unflatten(stored), StochasticRoundingState(next_key, inner_state)

    return storing_optimizer(init, step)


def stochastic_round(x: jax.Array, key: jax.Array) -> jax.Array:
    """Rounds float32 to one of the two nearest bfloat16 numbers, so that the mean over many keys is `x`.

    Args:
      x: float32 array of any shape. bfloat16 numbers, inf and NaN stay unchanged; larger numbers than its largest
        become that.
      key: a jax random key; each number has its own draw.

    Returns:
      bfloat16 array of the same shape.

    Raises:
      TypeError: `x` is not float32.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> x = jnp.full(1000, 1 + 2.0**-9)  # a quarter of the way from 1 to 1 + 2**-7
      >>> up = stochastic_round(x, jax.random.key(0)) > 1
      >>> 200 < int(up.sum()) < 300
      True

    Reference: Zamirai et al., "Revisiting BFloat16 Training", https://arxiv.org/abs/2010.06192.
    """
    if x.dtype != jnp.float32:
        raise TypeError(f"x must be float32, got {x.dtype}")
    return round_to(x, jnp.bfloat16, key)


def check_key(key: jax.Array) -> None:
    """Raises TypeError if an argument is not a single jax random key, typed or of uint32."""
    try:
        shape = (key if is_key(key) else jax.random.wrap_key_data(key)).shape
    except TypeError:
        shape = None
    if shape != ():
        raise TypeError(f"key must be a jax random key, such as jax.random.key(0), got {key!r}")


def check_rounding(rounding: object, key: jax.Array | None) -> None:
    """Raises an error if an argument is neither "stochastic" with or without a key, nor "nearest" without."""
    check_choice("rounding", rounding, ("stochastic", "nearest"))
    if key is not None:
        if rounding == "nearest":
            raise ValueError("key is only for rounding='stochastic'")
        check_key(key)


def next_keys(key: jax.Array | None, inner_state: PyTree) -> tuple[Any, Any]:
    """Returns the random keys of the next step and of this one; a skipped step keeps its key. None without a key.

    Args:
      key: the key that the state holds.
      inner_state: the wrapped optimizer's state after the step.
    """
    if key is None:
        return None, None
    next_key, step_key = split_in_two(key)
    for _, scaled in scaled_states(inner_state):
        next_key = select_tree(scaled.last_taken, next_key, key)
    return next_key, step_key


def _check_dtypes(params: Params) -> None:
    others = [
        f"{path!r} is {x.dtype.name}"
        for path, x in named_leaves(params)
        if is_float_array(x) and x.dtype.itemsize < 4 and x.dtype != jnp.bfloat16
    ]
    if others:
        raise ValueError(
            "with_stochastic_rounding takes parameters in bfloat16, float32 or float64, got " + ", ".join(others)
        )
