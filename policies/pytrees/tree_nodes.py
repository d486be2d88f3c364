"""Nodes of trees: found by their type in any nesting, as wrappers' states in optax's; and flax nnx objects.

nnx objects hold arrays and are mutable. They are found without importing nnx.
"""

import functools
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import jax
from jax.core import Tracer

from jmp_train.policies.pytrees.paths import path_name
from jmp_train.policies.types import PyTree

Node = TypeVar("Node")
Tree = TypeVar("Tree")

_PLAIN = str | bytes | int | float | complex | type | types.ModuleType | None
_FUNCTIONS = types.FunctionType | types.MethodType | functools.partial
_LIBRARIES = frozenset(("flax", "haiku", "jax", "jmp_train", "numpy", "optax"))
_MOST_ITEMS = 10_000  # of a container; data sets are not searched
_DEEPEST = 4  # levels of attributes of attributes, and of items of containers


def has_tracers(tree: PyTree) -> bool:
    """Returns whether a tree has a traced array, so that the caller is part of an outer program."""
    return any(isinstance(x, Tracer) for x in jax.tree.leaves(tree))


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


def find_nodes(tree: PyTree, kind: type[Node]) -> list[tuple[str, Node]]:
    """Returns (path, node) of every outermost node of a type; those in an `nnx.Optimizer` hold arrays."""
    nodes = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda node: isinstance(node, kind))
    return [
        (path_name(path), arrays_of_variables(node, is_optimizer_variable))
        for path, node in nodes
        if isinstance(node, kind)
    ]


def flax_nnx() -> Any:
    """Returns the module `flax.nnx` if the program has imported it, otherwise None."""
    return sys.modules.get("flax.nnx")


def _is_of_nnx(x: object, *kinds: str) -> bool:
    """Returns whether `x` is an instance of one of these classes of nnx; False if nnx is not imported."""
    nnx = flax_nnx()
    return nnx is not None and isinstance(x, tuple(getattr(nnx, kind) for kind in kinds))


def is_nnx_object(x: object) -> bool:
    """Returns whether `x` is an nnx module, optimizer, metric or other object with variables in it."""
    return _is_of_nnx(x, "Pytree")


def is_nnx_variable(x: object) -> bool:
    """Returns whether `x` is an `nnx.Variable`."""
    return _is_of_nnx(x, "Variable")


def is_nnx_statistic(x: object) -> bool:
    """Returns whether `x` is a variable that a forward pass updates: batch statistics, caches, keys."""
    return _is_of_nnx(x, "BatchStat", "Cache", "RngState", "Intermediate")


def is_nnx(x: object) -> bool:
    """Returns whether `x` is an nnx object or variable."""
    return is_nnx_object(x) or is_nnx_variable(x)


def is_optimizer_variable(x: object) -> bool:
    """Returns whether `x` is one of the variables in which an `nnx.Optimizer` stores optax's arrays."""
    return _is_of_nnx(x, "OptState")


def is_random_state(x: object) -> bool:
    """Returns whether `x` is a variable that holds a random key or counts its uses."""
    return _is_of_nnx(x, "RngState")


def is_parameter(x: object) -> bool:
    """Returns whether `x` is an `nnx.Param`."""
    return _is_of_nnx(x, "Param")


def arrays_of_variables(tree: PyTree, is_variable: Callable[[Any], bool] = is_nnx_variable) -> Any:
    """Returns a tree with the variables selected by `is_variable` replaced by their values."""
    if flax_nnx() is None:
        return tree
    return jax.tree_util.tree_map(lambda x: x.get_value() if is_variable(x) else x, tree, is_leaf=is_variable)


def unbound(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a module's method as a function with the module as its first argument; other functions unchanged."""
    if is_nnx_object(fn):
        return type(fn).__call__, (fn,)
    if isinstance(fn, types.MethodType) and is_nnx_object(fn.__self__):
        return fn.__func__, (fn.__self__,)
    return fn, ()


def contents(x: Any) -> dict[str, Any]:
    """Returns the contents of an nnx object or variable, by name; each value is a pytree."""
    if is_nnx_variable(x):
        return {"": x.get_raw_value(), "metadata": x.get_metadata()}
    return dict(vars(x))


class Search:
    """Finds nnx objects and variables, each once, with the path by which it was reached first.

    Attributes:
      found: (path, object) in the order of the search.
    """

    def __init__(self) -> None:
        self.found: list[tuple[str, Any]] = []
        self._seen: dict[int, Any] = {}  # keeps objects alive, so that no id is reused

    def in_tree(self, tree: PyTree, path: str = "") -> None:
        """Searches a pytree, and the nnx objects in it."""
        for inner, leaf in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_nnx):
            if is_nnx(leaf) and self._is_new(leaf):
                name = _join(path, path_name(inner))
                self.found.append((name, leaf))
                for attribute, value in contents(leaf).items():
                    self.in_tree(value, _join(name, attribute))

    def in_function(self, fn: object) -> None:
        """Searches the variables that a function closes over, binds, or uses from its module."""
        self._in_reach(fn, "", 0)

    def _in_reach(self, x: object, path: str, depth: int) -> None:
        if is_nnx(x):
            self.in_tree(x, path)
            return
        if isinstance(x, _PLAIN | jax.Array) or depth > _DEEPEST or not self._is_new(x):
            return
        deeper = depth + (not isinstance(x, _FUNCTIONS))
        for name, part in _parts(x):
            self._in_reach(part, _join(path, name), deeper)

    def _is_new(self, x: object) -> bool:
        if id(x) in self._seen:
            return False
        self._seen[id(x)] = x
        return True


def _join(path: str, name: str) -> str:
    return f"{path}/{name}" if path and name else path or name


def _parts(x: object) -> Iterator[tuple[str, Any]]:
    """Yields the contents of a function or any other Python object, by name."""
    if isinstance(x, types.FunctionType):
        yield from _captured(x)
    elif isinstance(x, types.MethodType):
        yield from (("", x.__self__), ("", x.__func__))
    elif isinstance(x, functools.partial):
        yield from (("", x.func), ("", x.args), ("", x.keywords))
    elif isinstance(x, Mapping):
        yield from ((str(key), value) for key, value in x.items() if len(x) <= _MOST_ITEMS)
    elif isinstance(x, list | tuple | set | frozenset):
        yield from ((str(i), value) for i, value in enumerate(x) if len(x) <= _MOST_ITEMS)
    else:
        yield "", getattr(x, "__wrapped__", None)
        yield from getattr(x, "__dict__", {}).items()


def _captured(fn: types.FunctionType) -> Iterator[tuple[str, Any]]:
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    yield from (("", fn.__defaults__), ("", fn.__kwdefaults__))
    if str(fn.__globals__.get("__name__")).partition(".")[0] not in _LIBRARIES:
        for name in _names(fn.__code__):
            yield name, fn.__globals__.get(name)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
