"""`LossScaledState`, the state of `with_loss_scale`, and functions that read it, replace it and follow its skips."""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.tree_util import KeyPath
from jax.typing import ArrayLike

from jmp_train.policies.loss_scaling import (
    LossScales,
    NoOpLossScale,
    PerLossScale,
    StaticLossScale,
    check_loss_scales,
    scales_in,
)
from jmp_train.policies.optimizers.skip_rules import reason_of_skip, taken_by_rules
from jmp_train.policies.pytrees import (
    copy_like,
    find_nodes,
    is_integer,
    named_leaves,
    only_state,
    path_name,
    select_state_leaf,
    stays_finite,
    with_states,
)
from jmp_train.policies.types import PyTree

Tree = TypeVar("Tree")

# The presets' names of the fields of a `DynamicLossScale`.
_OF_PRESETS = {
    "period": " (a preset's growth_interval or window)",
    "factor": " (a preset's growth_factor or scale_factor)",
}


class LossScaledState(NamedTuple):
    """State of `with_loss_scale`.

    Attributes:
      loss_scale: the `LossScale` of the next forward pass, or the `PerLossScale`.
      inner_state: the wrapped optimizer's state; unchanged by a skipped step. With a skip rule, a
        `SkipRuleState` of both.
      last_finite: bool scalar, True if the last gradients were finite; without a skip rule, the step was taken.
      skipped_steps: int32 scalar, number of skipped steps so far, for any reason.
      consecutive_skips: int32 scalar, number of steps skipped since the last one taken.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale, with_loss_scale
      >>> state = with_loss_scale(optax.sgd(0.1), torch_loss_scale()).init({"w": jnp.ones(2)})
      >>> int(state.skipped_steps), float(state.loss_scale.loss_scale)
      (0, 65536.0)
    """

    loss_scale: LossScales
    inner_state: Any
    last_finite: jax.Array
    skipped_steps: jax.Array
    consecutive_skips: jax.Array

    @property
    def last_taken(self) -> jax.Array:
        """Bool scalar, True if the last step was taken: its gradients were finite, and no rule skipped it."""
        return taken_by_rules(self.last_finite, self.inner_state)

    @property
    def skip_reason(self) -> jax.Array:
        """Int32 scalar: 0 if the last step was taken, 1 if its gradients were not finite, 2 if the rule skipped it."""
        return reason_of_skip(self.last_finite, self.last_taken)


def scaled_states(opt_state: PyTree) -> list[tuple[str, LossScaledState]]:
    """Returns (path, state) of every outermost `LossScaledState` in any nesting."""
    return find_nodes(opt_state, LossScaledState)


def loss_scale_of(opt_state: PyTree) -> LossScales:
    """Returns the loss scale in an optimizer's state, or a `NoOpLossScale` if there is none."""
    return get_loss_scale(opt_state) if scaled_states(opt_state) else NoOpLossScale()


def get_loss_scale(opt_state: PyTree, *, loss_id: int | None = None) -> Any:
    """Returns the only loss scale in an optimizer's state.

    Args:
      opt_state: a state with one `LossScaledState` in it, in any nesting of optax's combinators, or an
        `nnx.Optimizer` with such a state, also within `nnx.jit`.
      loss_id: index of a loss of a `PerLossScale`, from 0; None for the whole loss scale.

    Returns:
      The `LossScale` of the next forward pass: `.loss_scale` is the number, `.scale(loss)` applies it. Or the
      `PerLossScale`, if there is one.

    Raises:
      ValueError: there is none, or there are several (the message lists their paths), or there is no
        loss of that index.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale, with_loss_scale
      >>> optimizer = optax.chain(with_loss_scale(optax.sgd(0.1), torch_loss_scale()))
      >>> float(get_loss_scale(optimizer.init(jnp.ones(2))).scale(jnp.float16(2.0)))
      131072.0
    """
    loss_scale = _only_scaled_state(opt_state).loss_scale
    if loss_id is None:
        return loss_scale
    scales = scales_in(loss_scale)
    if not is_integer(loss_id) or not 0 <= loss_id < len(scales):
        raise ValueError(f"loss_id={loss_id!r} must be a whole number below num_losses={len(scales)}")
    return scales[loss_id]


def set_loss_scale(opt_state: PyTree, loss_scale: LossScales) -> Any:
    """Returns an optimizer's state with its loss scale replaced.

    It sets the scale and its counters. Settings that are not leaves, such as the period, belong to the
    compiled step and must be equal. The counters of skips stay.

    Args:
      opt_state: a state with one `LossScaledState` in it, in any nesting of optax's combinators. An
        `nnx.Optimizer` with such a state is changed in place, as by its `update`, and returned.
      loss_scale: the scale of the next forward pass, of the same kind as in the state. Its arrays
        are copied to the placement of the state's.

    Returns:
      The same state except for the loss scale.

    Raises:
      TypeError: `loss_scale` is not a loss scale.
      ValueError: the state has no loss scale or several, or one of another kind, with other
        settings or of another shape; the message has the difference.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from jmp_train.policies import torch_loss_scale, with_loss_scale
      >>> state = with_loss_scale(optax.sgd(0.1), torch_loss_scale()).init(jnp.ones(2))
      >>> state = set_loss_scale(state, torch_loss_scale(init_scale=1024.0))
      >>> float(get_loss_scale(state).loss_scale)
      1024.0

      As torch's `scaler.update(512.0)`, which keeps the settings and the count of good steps:

      >>> import dataclasses
      >>> scale = dataclasses.replace(get_loss_scale(state), loss_scale=jnp.float32(512))
      >>> float(get_loss_scale(set_loss_scale(state, scale)).loss_scale)
      512.0
    """
    check_loss_scales(loss_scale, "torch_loss_scale(init_scale=number) makes one")
    old = _only_scaled_state(opt_state).loss_scale
    if jax.tree_util.tree_structure(loss_scale) != jax.tree_util.tree_structure(old):
        settings = "keep them, dataclasses.replace(get_loss_scale(opt_state), loss_scale=number), or "
        raise ValueError(
            f"loss_scale differs from opt_state's in kind or settings: {_difference(loss_scale, old)}; "
            f"{settings if type(loss_scale) is type(old) else ''}make a new optimizer with with_loss_scale(optimizer, "
            "loss_scale) and call adopt_opt_state(new_optimizer.init(params), opt_state)"
        )
    jax.tree_util.tree_map_with_path(_check_shape, loss_scale, old)
    new = jax.tree_util.tree_map(copy_like, loss_scale, old)
    return with_states(opt_state, LossScaledState, lambda state: state._replace(loss_scale=new))


def _only_scaled_state(opt_state: PyTree) -> LossScaledState:
    return only_state(opt_state, LossScaledState, "loss_scale", "loss scales", "with_loss_scale")


def _difference(new: LossScales, old: LossScales) -> str:
    """Returns the structural fields that differ between two loss scales."""
    if isinstance(new, PerLossScale) and isinstance(old, PerLossScale):
        if len(new.loss_scales) != len(old.loss_scales):
            return f"for {len(old.loss_scales)} losses, not {len(new.loss_scales)}"
        pairs = zip(new.loss_scales, old.loss_scales, strict=True)
        structure = jax.tree_util.tree_structure
        return next(_difference(*pair) for pair in pairs if structure(pair[0]) != structure(pair[1]))
    if type(new) is not type(old):
        return f"a {type(old).__name__}, not a {type(new).__name__}"
    leaves = {name for tree in (new, old) for name, _ in named_leaves(tree)}
    fields = ", ".join(
        f"{field.name}={getattr(old, field.name)!r}, not {getattr(new, field.name)!r}{_OF_PRESETS.get(field.name, '')}"
        for field in (dataclasses.fields(new) if dataclasses.is_dataclass(new) else ())
        if field.name not in leaves and getattr(new, field.name) != getattr(old, field.name)
    )
    if fields:
        return fields
    if isinstance(new, StaticLossScale):
        return "the number of one is an array, that of the other is not"
    structures = [jax.tree_util.tree_structure(tree) for tree in (old, new)]
    return f"{structures[0]}, not {structures[1]}"


def _check_shape(path: KeyPath, new: ArrayLike, old: jax.Array) -> None:
    if jnp.shape(new) != jnp.shape(old):
        raise ValueError(
            f"loss_scale: {path_name(path)} must have shape {jnp.shape(old)} as in opt_state, got {jnp.shape(new)}; "
            "set it before replicating the state"
        )


def select_step(opt_state: PyTree, new: Tree, old: Tree, *, axis_names: Sequence[str] = ()) -> Tree:
    """Returns `new` if the optimizer's last step was taken and nothing in it overflowed, otherwise `old`.

    `with_loss_scale` keeps parameters and optimizer state in a skipped step. It does not see the
    values that the forward pass updates: batch statistics, an average of the parameters, the state of an
    equinox or nnx model, which an overflow may have filled with inf. A user-defined step passes
    them here, all in one tree; `train_step` does so for its model state.

    They may overflow even if all gradients are finite. If a number that was finite is not finite in `new`, the step
    stays taken, and the whole tree is `old` except for random keys (arrays of uint32 count as keys).
    `jmp_train.policies.stays_finite(new, old)` is False then.

    Args:
      opt_state: the state from the optimizer's `update`, with one `LossScaledState` in any
        nesting; or an object that holds it, such as a flax TrainState.
      new: pytree after the step. Leaves that are not arrays or numbers, such as functions,
        are taken from here.
      old: pytree of the same structure, shapes and dtypes, from before the step.
      axis_names: axes of an enclosing `shard_map` or `pmap` whose devices keep `old` together.

    Returns:
      A tree like `new`.

    Raises:
      TypeError: two leaves differ in shape or dtype; the message names the leaf.
      ValueError: the trees' structures differ, `opt_state` has no loss scale or several, or `MultiSteps` or
        `apply_if_finite` is around `with_loss_scale`, which then does not see every step.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> import jmp_train as jt
      >>> optimizer = jt.with_loss_scale(optax.sgd(0.1), jt.torch_loss_scale())
      >>> params = {"w": jnp.ones(2)}
      >>> opt_state = optimizer.init(params)
      >>> updates, opt_state = optimizer.update({"w": jnp.array([1.0, jnp.inf])}, opt_state, params)
      >>> jt.select_step(opt_state, {"mean": jnp.full(1, jnp.inf)}, {"mean": jnp.zeros(1)})
      {'mean': Array([0.], dtype=float32)}
    """
    _check_sees_every_step(opt_state)
    state = only_state(opt_state, LossScaledState, "loss_scale", "loss scales", "with_loss_scale")
    taken = state.last_taken
    trees = [jax.tree_util.tree_structure(tree) for tree in (new, old)]
    if trees[0] != trees[1]:
        raise ValueError(f"new and old must have the same structure, got new:\n  {trees[0]}\nand old:\n  {trees[1]}")

    finite = stays_finite(new, old, axis_names)

    def select(path: KeyPath, x: object, y: object) -> Any:
        is_number = isinstance(x, int | float | complex) and not isinstance(x, np.generic)
        if x is y or (is_number and type(x) is type(y) and x == y):
            return x  # for example a setting of the model, which stays a Python number
        return select_state_leaf(path, taken, finite, x, y)

    return jax.tree_util.tree_map_with_path(select, new, old)


def _check_sees_every_step(opt_state: PyTree) -> None:
    """Raises ValueError with the name of the wrapper if `with_loss_scale` only sees the gradients of some steps."""
    around: Any = optax.MultiStepsState | optax.ApplyIfFiniteState
    for path, node in find_nodes(opt_state, around):
        if not scaled_states(tuple(node)):
            continue
        name = "MultiSteps" if isinstance(node, optax.MultiStepsState) else "apply_if_finite"
        raise ValueError(
            f"opt_state has {name}, at {path or 'the outermost place'!r}, around with_loss_scale: skipped steps are "
            "then not known, and NaN of an overflow may stay in its sums; put with_loss_scale outside: "
            f"with_loss_scale(optax.{name}(optimizer, ...), loss_scale)"
        )
