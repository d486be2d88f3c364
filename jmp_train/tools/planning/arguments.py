"""Classifies the arguments of a step by names on their paths, or the types that hold them."""

import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.tree_util import KeyPath

from jmp_train.policies.pytrees import flax_nnx
from jmp_train.tools.aot import Argument, is_shape

PARAMETERS, OPTIMIZER_STATE, MODEL_STATE, OTHERS = "parameters", "optimizer state", "model state", "other arguments"
_NAMES = {
    **dict.fromkeys(("params", "parameters"), PARAMETERS),
    **dict.fromkeys(("opt_state", "opt_states", "optimizer", "optimizer_state"), OPTIMIZER_STATE),
    **dict.fromkeys(("model_state", "batch_stats"), MODEL_STATE),
}
_OPTIMIZERS = ("optax.", "jmp_train.policies.")  # modules, whose classes "...State" hold what optimizers carry


def arguments_of(paths: Sequence[str], state: Any) -> dict[int, Argument]:
    """Returns the arguments of a step by their numbers, each in its group.

    Args:
      paths: paths of state and batch, such as "state.params['kernel']".
      state: its shapes: a `TrainState`, flax's, nnx objects, or optax's states in tuples and dicts next to parameters.
        Parameters are then all other floats.

    Example:
      >>> import optax
      >>> params = {"w": jax.ShapeDtypeStruct((3,), "float32")}
      >>> state = (params, jax.eval_shape(optax.adam(1e-3).init, params))
      >>> paths = ["state[0]['w']", "state[1][0].count", "state[1][0].mu['w']", "state[1][0].nu['w']", "batch['x']"]
      >>> [argument.group for argument in arguments_of(paths, state).values()]
      ['parameters', 'optimizer state', 'optimizer state', 'optimizer state', 'batch']
    """
    nodes = jax.tree_util.tree_flatten_with_path(state, is_leaf=lambda x: _group_of(x) is not None)[0]
    grouped = [
        (leaf, _group_of(node) or _group_by_name(path))
        for path, node in nodes
        for leaf in filter(is_shape, jax.tree.leaves(node))
    ]
    groups = [group for _, group in grouped]
    if PARAMETERS not in groups and any(_group_of(node) == OPTIMIZER_STATE for _, node in nodes):
        groups = [PARAMETERS if group == OTHERS and _is_float(leaf) else group for leaf, group in grouped]
    groups += ["batch"] * (len(paths) - len(groups))
    return {i: Argument(path, group) for i, (path, group) in enumerate(zip(paths, groups, strict=True))}


def _group_by_name(path: KeyPath) -> str:
    names = (str(getattr(key, "name", getattr(key, "key", ""))) for key in path)
    return next((_NAMES[name] for name in names if name in _NAMES), OTHERS)


def _group_of(node: object) -> str | None:
    """Returns the group of a node's arrays if its type determines it."""
    kind, nnx, equinox = type(node), flax_nnx(), sys.modules.get("equinox")
    if kind.__module__.startswith(_OPTIMIZERS) and kind.__name__.endswith("State"):
        return OPTIMIZER_STATE
    if nnx is not None and isinstance(node, nnx.Variable):
        kinds = {nnx.OptState: OPTIMIZER_STATE, nnx.Param: PARAMETERS, nnx.BatchStat: MODEL_STATE}
        return next((group for kind, group in kinds.items() if isinstance(node, kind)), OTHERS)
    if equinox is not None and isinstance(node, equinox.nn.State):
        return MODEL_STATE
    return None


def _is_float(shape: jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(shape.dtype, jnp.inexact)
