"""Checks that arguments have values, for callers that run a function instead of tracing it."""

import jax

from jmp_train.policies.pytrees.paths import path_name
from jmp_train.policies.pytrees.tree_nodes import has_tracers
from jmp_train.policies.types import PyTree


def check_values(args: PyTree, caller: str) -> None:
    """Raises an error if the values of arguments are not available in this process.

    Args:
      args: a pytree.
      caller: the name of the function that needs them.

    Raises:
      TypeError: an array is traced, or a leaf is a `ShapeDtypeStruct`.
      ValueError: an array is divided between several processes.
    """
    if has_tracers(args):
        raise TypeError(f"{caller} needs concrete values; call it outside of transforms such as jax.jit")
    for path, leaf in jax.tree_util.tree_leaves_with_path(args):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise TypeError(f"args {path_name(path)!r} is a ShapeDtypeStruct; {caller} needs arrays with values")
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            raise ValueError(
                f"args {path_name(path)!r} is sharded over several processes; {caller} runs in one process, with its "
                "own part of the batch and its own state"
            )
