"""The loss scale inside the optax state: unscale, test, step or skip, adapt.

The wrapped optimizer works in float32 whatever the gradients and parameters are, so that its
moments neither overflow nor stagnate. What it sees is unscaled and finite: clipping, weight decay
and schedules belong inside, and `with_loss_scale` belongs outermost.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.core import Tracer

from jmp_train.policies.argument_checks import is_integer
from jmp_train.policies.casting import widen_to_float32
from jmp_train.policies.finite import select_tree
from jmp_train.policies.loss_scale import LossScale, check_usable
from jmp_train.policies.nodes import Reached, find_nodes, only_state, with_states
from jmp_train.policies.paths import named_leaves, path_name
from jmp_train.policies.per_loss_scale import (
    LossScales,
    PerLossScale,
    scales_in,
    unscale_and_test,
)
from jmp_train.policies.stored_parameters import StochasticRoundingState, StoringOptimizer


class LossScaledState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the `LossScale` of the next forward pass, or the `PerLossScale`.
      inner_state: the wrapped optimizer's state; unchanged by a skipped step.
      last_finite: bool scalar, whether the last gradients were finite and so the step taken.
      skipped_steps: int32 scalar, how many steps were skipped so far.
      consecutive_skips: int32 scalar, how many of them came last in a row.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale
      >>> state = with_loss_scale(optax.sgd(0.1), torch_loss_scale()).init({"w": jnp.ones(2)})
      >>> int(state.skipped_steps), float(state.loss_scale.loss_scale)
      (0, 65536.0)
    """

    loss_scale: LossScales
    inner_state: Any
    last_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array


class LossScaledOptimizer(optax.GradientTransformationExtraArgs):
    """What `with_loss_scale` returns: an optax optimizer that can also leave the skipping to you.

    `propose` takes the arguments of `update` and returns the same state, but the updates as the
    optimizer made them, possibly of NaN: for a step that selects the parameters by
    `state.last_finite`, which saves a second selection.

    Example:
      >>> import optax
      >>> from jmp_train.policies import torch_loss_scale
      >>> isinstance(with_loss_scale(optax.sgd(0.1), torch_loss_scale()), LossScaledOptimizer)
      True
    """

    propose: optax.TransformUpdateExtraArgsFn


def with_loss_scale(
    optimizer: optax.GradientTransformation | optax.MultiSteps,
    loss_scale: LossScales,
) -> LossScaledOptimizer:
    """Makes an optimizer take scaled gradients, skip non-finite ones and adapt the scale.

    `update(updates, state, params, *, axis_names=(), **extra_args)` widens the scaled gradients to
    float32, divides them by the scale of their forward pass, tests them over all devices of
    `axis_names`, and steps or skips. A skip gives updates of minus zero, which `apply_updates`
    adds without changing a bit, and leaves `inner_state` as it was. The extra arguments reach the
    optimizer as they are, but for `grad`, which line searches take: it gets the unscaled gradients.

    Args:
      optimizer: any optax optimizer. It sees float32 gradients and parameters.
      loss_scale: the scale to begin with. `NoOpLossScale()` skips without scaling, which is what
        bfloat16 wants. A `PerLossScale` has one for each loss, and `update` a tuple of gradients.

    Returns:
      An optimizer whose state is a `LossScaledState`.

    Raises:
      TypeError: an argument is of another type; the message names it.
      ValueError: a static scale is not finite and above 0; at `init`, the optimizer has a loss scale already, or rounds stochastically.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import StaticLossScale
      >>> optimizer = with_loss_scale(optax.sgd(1.0), StaticLossScale(8.0))
      >>> params = {"w": jnp.ones(2)}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update({"w": jnp.array([8.0, 16.0])}, state, params)
      >>> optax.apply_updates(params, updates)["w"]
      Array([ 0., -1.], dtype=float32)
      >>> updates, state = optimizer.update({"w": jnp.array([8.0, jnp.inf])}, state, params)
      >>> int(state.skipped_steps), bool(state.last_finite)
      (1, False)

    Reference: `torch.amp.GradScaler.step` and `update`; `optax.apply_if_finite`.
    """
    inner = as_transformation(optimizer)
    if isinstance(inner, StoringOptimizer):
        raise TypeError(
            "optimizer must not store the parameters: with_master_weights and with_stochastic_rounding go "
            "outside, with_master_weights(with_loss_scale(optimizer, loss_scale))"
        )
    for scale in scales_in(loss_scale):
        if not isinstance(scale, LossScale):
            raise TypeError(
                f"loss_scale must be a LossScale, got {scale!r}; for a number pass "
                "StaticLossScale(number) or torch_loss_scale(init_scale=number)"
            )
        check_usable(scale)

    def init(params: Any) -> Any:
        inner_state = inner.init(widen_to_float32(params))
        if scaled_states(inner_state):
            raise ValueError("optimizer has a loss scale already: gradients would be divided twice")
        if find_nodes(inner_state, StochasticRoundingState):
            raise ValueError(
                "optimizer rounds stochastically, but sees float32 here: with_stochastic_rounding goes outside "
                "of with_loss_scale"
            )
        return LossScaledState(
            loss_scale=jax.tree_util.tree_map(jnp.array, loss_scale),
            inner_state=inner_state,
            last_finite=jnp.array(True),
            skipped_steps=jnp.zeros((), jnp.int32),
            consecutive_skips=jnp.zeros((), jnp.int32),
        )

    def propose(
        updates: Any,
        state: Any,
        params: Any = None,
        *,
        axis_names: Sequence[str] = (),
        **extra_args: Any,
    ) -> tuple[Any, Any]:
        if isinstance(state, Reached):
            return jax.tree_util.tree_map(jnp.zeros_like, params), Reached(updates)
        grads, finite, next_scale = unscale_and_test(
            state.loss_scale, widen_to_float32(updates), axis_names
        )
        if "grad" in extra_args:  # which a line search compares with the loss
            extra_args = {**extra_args, "grad": grads}
        new_updates, new_inner_state = inner.update(
            grads, state.inner_state, widen_to_float32(params), **extra_args
        )
        skipped = (~finite).astype(jnp.int32)
        return new_updates, LossScaledState(
            loss_scale=next_scale,
            inner_state=select_tree(finite, new_inner_state, state.inner_state),
            last_finite=finite,
            skipped_steps=state.skipped_steps + skipped,
            consecutive_skips=(state.consecutive_skips + 1) * skipped,
        )

    def update(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        new_updates, state = propose(updates, state, params, **extra_args)
        if isinstance(state, Reached):
            return new_updates, state
        finite = state.last_finite
        return jax.tree_util.tree_map(lambda u: _or_nothing(finite, u), new_updates), state

    scaled = LossScaledOptimizer(init, update)
    scaled.propose = propose
    return scaled


def as_transformation(optimizer: Any) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that takes extra arguments; raises TypeError if it is no optimizer."""
    if isinstance(optimizer, optax.MultiSteps):
        optimizer = optimizer.gradient_transformation()
    if not isinstance(optimizer, optax.GradientTransformation):
        raise TypeError(f"optimizer must be an optax.GradientTransformation, got {optimizer!r}")
    return optax.with_extra_args_support(optimizer)


def _or_nothing(finite: jax.Array, update: jax.Array) -> jax.Array:
    # x + -0.0 is x for every x; 0.0 would turn a parameter of -0.0 into 0.0. Complex ones have two signs.
    return jnp.where(finite, update, -jnp.zeros_like(update))


def scaled_states(opt_state: Any) -> list[tuple[str, LossScaledState]]:
    """Returns (path, state) of every outermost `LossScaledState` in any nesting."""
    return find_nodes(opt_state, LossScaledState)


def get_loss_scale(opt_state: Any, *, loss_id: int | None = None) -> Any:
    """Returns the one loss scale in an optimizer's state.

    Args:
      opt_state: a state with one `LossScaledState` in it, in any nesting of optax's combinators, or an
        `nnx.Optimizer` that has one, also within `nnx.jit`.
      loss_id: of a `PerLossScale` the scale of that loss, from 0; None for all of it.

    Returns:
      The `LossScale` of the next forward pass: `.loss_scale` is the number, `.scale(loss)` applies it. Or the
      `PerLossScale`, if there is one.

    Raises:
      ValueError: there is none, or there are several, where the message lists their paths; or there is no
        loss of that number.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale
      >>> optimizer = optax.chain(with_loss_scale(optax.sgd(0.1), torch_loss_scale()))
      >>> float(get_loss_scale(optimizer.init(jnp.ones(2))).scale(jnp.float16(2.0)))
      131072.0
    """
    loss_scale = _only_scaled_state(opt_state).loss_scale
    if loss_id is None:
        return loss_scale
    scales = scales_in(loss_scale)
    if not is_integer(loss_id) or not 0 <= loss_id < len(scales):
        raise ValueError(
            f"loss_id={loss_id!r} must be a whole number below num_losses={len(scales)}"
        )
    return scales[loss_id]


def set_loss_scale(opt_state: Any, loss_scale: LossScales) -> Any:
    """Returns an optimizer's state with another loss scale in the place of its one.

    The scale and its counters are set; what is no leaf, such as the period, belongs to the
    compiled step and has to be what it was. The counters of skips stay.

    Args:
      opt_state: a state with one `LossScaledState` in it, in any nesting of optax's combinators. An
        `nnx.Optimizer` that has one is changed itself, as its `update` does, and returned.
      loss_scale: the scale of the next forward pass, of the kind that the state has. Its arrays
        are copied to where the state's are.

    Returns:
      The same state but for the loss scale.

    Raises:
      TypeError: `loss_scale` is none.
      ValueError: the state has no loss scale or several, or one of another kind, with other
        settings or of another shape; the message says what differs.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale
      >>> state = with_loss_scale(optax.sgd(0.1), torch_loss_scale()).init(jnp.ones(2))
      >>> state = set_loss_scale(state, torch_loss_scale(init_scale=1024.0))
      >>> float(get_loss_scale(state).loss_scale)
      1024.0
    """
    if not isinstance(loss_scale, LossScales):
        raise TypeError(f"loss_scale must be a LossScale, got {loss_scale!r}")
    old = _only_scaled_state(opt_state).loss_scale
    if jax.tree_util.tree_structure(loss_scale) != jax.tree_util.tree_structure(old):
        raise ValueError(
            f"opt_state has another kind of loss scale: {_difference(loss_scale, old)}; "
            "make the optimizer anew, with_loss_scale(optimizer, loss_scale)"
        )
    new = jax.tree_util.tree_map_with_path(
        lambda path, x, y: _in_place_of(path_name(path), x, y), loss_scale, old
    )
    return with_states(opt_state, LossScaledState, lambda state: state._replace(loss_scale=new))


def _only_scaled_state(opt_state: Any) -> LossScaledState:
    return only_state(opt_state, LossScaledState, "loss_scale", "loss scales")


def _difference(new: LossScales, old: LossScales) -> str:
    """Returns which fields that are structure differ between two loss scales."""
    if isinstance(new, PerLossScale) and isinstance(old, PerLossScale):
        if len(new.loss_scales) != len(old.loss_scales):
            return f"for {len(old.loss_scales)} losses, not {len(new.loss_scales)}"
        pairs = zip(new.loss_scales, old.loss_scales, strict=True)
        structure = jax.tree_util.tree_structure
        return next(
            _difference(*pair) for pair in pairs if structure(pair[0]) != structure(pair[1])
        )
    if type(new) is not type(old):
        return f"a {type(old).__name__}, not a {type(new).__name__}"
    leaves = {name for tree in (new, old) for name, _ in named_leaves(tree)}
    fields = ", ".join(
        f"{field.name}={getattr(old, field.name)!r}, not {getattr(new, field.name)!r}"
        for field in dataclasses.fields(new)
        if field.name not in leaves and getattr(new, field.name) != getattr(old, field.name)
    )
    return fields or "the number of one is an array, that of the other is not"


def _in_place_of(name: str, new: Any, old: Any) -> jax.Array:
    """Returns a copy of an array in the dtype and on the devices of another."""
    if jnp.shape(new) != jnp.shape(old):
        raise ValueError(
            f"{name} of opt_state's loss scale has the shape {jnp.shape(old)}, got "
            f"{jnp.shape(new)}; set it before the state is copied to many devices or members"
        )
    x = jnp.array(new, old.dtype)
    on_devices = isinstance(old, jax.Array) and not isinstance(old, Tracer)
    return jax.device_put(x, old.sharding) if on_devices and old.committed else x
