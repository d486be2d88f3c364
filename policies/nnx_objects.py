"""flax nnx's objects, which hold arrays and are changed in place; nnx is looked for, never imported."""

import sys
from typing import Any

import jax


def flax_nnx() -> Any:
    """Returns the module `flax.nnx`, if the program has imported it, else None."""
    return sys.modules.get("flax.nnx")


def is_nnx_object(x: Any) -> bool:
    """Says whether `x` is an nnx module, optimizer, metric or other object with variables in it."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Pytree)


def is_nnx_variable(x: Any) -> bool:
    """Says whether `x` is an `nnx.Variable`."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.Variable)


def is_nnx_statistic(x: Any) -> bool:
    """Says whether `x` is a variable of what a forward pass counts or draws: batch statistics, caches, keys."""
    nnx = flax_nnx()
    kinds = () if nnx is None else (nnx.BatchStat, nnx.Cache, nnx.RngState, nnx.Intermediate)
    return isinstance(x, kinds)


def is_optimizer_variable(x: Any) -> bool:
    """Says whether `x` is one of the variables in which an `nnx.Optimizer` keeps optax's arrays."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, nnx.OptState)


def arrays_of_variables(tree: Any, is_variable: Any = is_nnx_variable) -> Any:
    """Returns a tree with variables' values in their places; `is_variable` says which."""
    if flax_nnx() is None:
        return tree
    return jax.tree_util.tree_map(
        lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable
    )
