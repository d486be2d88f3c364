"""`select_step`, for user-defined train steps: keeps or reverts all changes of a step."""

from typing import Any, TypeVar

import jax
import numpy as np
import optax
from jax.tree_util import KeyPath

from jmp_train.policies.optimizers.loss_scaled_state import LossScaledState, scaled_states
from jmp_train.policies.pytrees import find_nodes, only_state, select_leaf
from jmp_train.policies.types import PyTree

Tree = TypeVar("Tree")


def select_step(opt_state: PyTree, new: Tree, old: Tree) -> Tree:
    """Returns `new` if the optimizer's last step was taken and `old` if it was skipped.

    `with_loss_scale` keeps parameters and optimizer state in a skipped step. It does not see the
    values that the forward pass updates: batch statistics, an average of the parameters, the state of an
    equinox or nnx model, which an overflow may have filled with inf. A user-defined step passes
    them here, all in one tree; `train_step` does so for its model state.

    Args:
      opt_state: the state from the optimizer's `update`, with one `LossScaledState` in any
        nesting; or an object that holds it, such as a flax TrainState.
      new: pytree after the step. Leaves that are not arrays or numbers, such as functions,
        are taken from here.
      old: pytree of the same structure, shapes and dtypes, from before the step.

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

    def select(path: KeyPath, x: object, y: object) -> Any:
        is_number = isinstance(x, int | float | complex) and not isinstance(x, np.generic)
        if x is y or (is_number and type(x) is type(y) and x == y):
            return x  # for example a setting of the model, which stays a Python number
        return select_leaf(path, taken, x, y)

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
