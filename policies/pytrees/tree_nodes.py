"""Finds the nodes of a type in a tree, in any nesting: wrappers' states in optax's, modules in models."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from jmp_train.policies.pytrees.nnx_objects import arrays_of_variables, is_nnx_object, is_optimizer_variable
from jmp_train.policies.pytrees.paths import path_name
from jmp_train.policies.types import PyTree

Node = TypeVar("Node")
Tree = TypeVar("Tree")


def has_tracers(tree: PyTree) -> bool:
    """Returns whether a tree has a traced array, so that the caller is part of an outer program."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


def find_nodes(tree: PyTree, kind: type[Node]) -> list[tuple[str, Node]]:
    """Returns (path, node) of every outermost node of a type; those in an `nnx.Optimizer` hold arrays."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    return [
        (path_name(path), arrays_of_variables(node, is_optimizer_variable))
        for path, node in nodes
        if isinstance(node, kind)
    ]


def change_nodes(tree: Tree, kind: type[Node], change: Callable[[Node], Any]) -> Tree:
    """Returns a tree with every outermost node of a type changed."""

    def is_of_kind(node: object) -> bool:
        return isinstance(node, kind)

    return jax.tree_util.tree_map(lambda node: change(node) if is_of_kind(node) else node, tree, is_leaf=is_of_kind)


def with_states(opt_state: Tree, kind: type[Node], change: Callable[[Node], Any]) -> Tree:
    """Returns an optimizer's state with the arrays of every state of a type changed.

    Args:
      opt_state: a state in any nesting. An `nnx.Optimizer` is changed in place, as by its `update`.
      kind: the type of the states.
      change: gets a state of arrays, even if nnx stores these in variables.
    """
    in_place = is_nnx_object(opt_state)

    def set_variable(variable: Any, new: Any) -> Any:
        if not is_optimizer_variable(variable):
            return new
        if not in_place:
            return variable.replace(new)
        variable.set_value(new)
        return variable

    def changed(node: Node) -> Any:
        new = change(arrays_of_variables(node, is_optimizer_variable))
        return jax.tree_util.tree_map(set_variable, node, new, is_leaf=is_optimizer_variable)

    result = change_nodes(opt_state, kind, changed)
    return opt_state if in_place else result


def only_state(opt_state: PyTree, kind: type[Node], field: str, plural: str, wrapper: str) -> Node:
    """Returns the only state of a type in an optimizer's state; raises ValueError if there is not exactly one.

    Args:
      opt_state: a state in any nesting of optax's combinators.
      kind: the type of the state.
      field: a field of the state, for the messages.
      plural: its plural there.
      wrapper: the function whose optimizers have such a state.
    """
    found = find_nodes(opt_state, kind)
    if not found:
        raise ValueError(f"opt_state has no {field.replace('_', ' ')}; wrap the optimizer in {wrapper}")
    if len(found) > 1:
        paths = ", ".join(repr(path) for path, _ in found)
        raise ValueError(f"opt_state has {len(found)} {plural}, at {paths}; select one: opt_state[...].{field}")
    return found[0][1]


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
