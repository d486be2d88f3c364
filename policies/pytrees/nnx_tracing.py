"""nnx objects within a trace: the changes that a traced function makes leave the trace as results.

nnx lets an object change only in the trace that made it. A function that `autocast` traces gets the
caller's own objects, which belong to the trace while it runs. Their new values
leave the trace next to its results, and are then written to the same objects.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from jmp_train.policies.pytrees.tree_nodes import Search, contents, flax_nnx, is_nnx, is_nnx_variable
from jmp_train.policies.types import PyTree

_Parts = dict[str, tuple[list[Any], Any]]  # by name: leaves, which may be other nnx objects; structure


def is_array(leaf: object) -> TypeGuard[jax.Array]:
    """Returns whether a leaf is an array of jax or NumPy."""
    return isinstance(leaf, jax.Array | np.ndarray | np.generic)


@dataclasses.dataclass(frozen=True)
class _Entry:
    """An nnx object that existed before the trace.

    Attributes:
      path: its path from the arguments, or from the function that reaches it.
      object: the object.
      stored: its parts in the caller.
      home: its parts and its own trace, to restore.
    """

    path: str
    object: Any
    stored: _Parts
    home: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class _Change:
    """The changes that a trace made to an nnx object.

    Attributes:
      object: the object.
      parts: the changed parts.
      removed: the names of the removed attributes.
      dtypes: for each array of the parts, in order, the dtype in which it is stored, or None for its own.
      is_new: whether the trace created the object.
    """

    object: Any
    parts: _Parts
    removed: tuple[str, ...]
    dtypes: list[Any]
    is_new: bool


class Carried:
    """The nnx objects that a function can reach, on their way into a trace and out of it.

    Args:
      tree: the function's arguments.
      fn: the function.

    Attributes:
      arrays: the values of the variables among the arguments, which are inputs of the trace.
    """

    def __init__(self, tree: PyTree, fn: Callable[..., Any]) -> None:
        self.arrays: list[Any] = []
        self._entries: dict[int, _Entry] = {}
        self._foreign: dict[int, tuple[str, Any]] = {}
        self._inputs: list[_Entry] = []
        self._given: dict[int, _Parts] = {}
        self._changes: list[_Change] = []
        if flax_nnx() is None:
            return
        search = Search()
        search.in_tree(tree)
        arguments = len(search.found)
        search.in_function(fn)
        for index, (path, x) in enumerate(search.found):
            if is_boxed(x):
                continue
            if not is_at_home(x):
                self._foreign[id(x)] = path, x
                continue
            entry = _Entry(path, x, _parts(x), _home(x))
            self._entries[id(x)] = entry
            if index < arguments and is_nnx_variable(x):
                self._inputs.append(entry)
                self.arrays += filter(is_array, entry.stored[""][0])

    @contextlib.contextmanager
    def at_home(self, arrays: Sequence[Any] = ()) -> Iterator[None]:
        """Lets the objects change within this context; afterwards they have their old values.

        Args:
          arrays: the values of the variables among the arguments within it, in place of `self.arrays`.
        """
        rest = iter(arrays)
        try:
            for entry in self._entries.values():
                _move_here(entry.object)
            for entry in self._inputs if arrays else ():
                leaves, structure = entry.stored[""]
                leaves = [next(rest) if is_array(leaf) else leaf for leaf in leaves]
                entry.object.set_raw_value(jax.tree.unflatten(structure, leaves))
            self._given = {key: _parts(entry.object) for key, entry in self._entries.items()}
            yield
        except Exception as error:
            self._explain(error)
            raise
        finally:
            for entry in self._entries.values():
                _put_home(entry.object, entry.home)

    def changed(self, results: object) -> list[Any]:
        """Returns the arrays that the objects got in the trace, which are its outputs; call it at the end of the trace.

        Args:
          results: the results of the function, possibly with new nnx objects.
        """
        search = Search()
        search.in_tree([entry.object for entry in self._entries.values()])
        search.in_tree(results)
        self._changes = [
            change
            for _, x in search.found
            if id(x) not in self._foreign and not is_boxed(x) and (change := self._change(x)) is not None
        ]
        return [
            leaf for change in self._changes for leaves, _ in change.parts.values() for leaf in leaves if is_array(leaf)
        ]

    def write(self, arrays: Iterator[Any]) -> None:
        """Writes arrays into the objects, outside of the trace, in place of those from `changed`."""
        for change in self._changes:
            if change.is_new:
                _move_here(change.object)
            for name in change.removed:
                del vars(change.object)[name]
            dtypes = iter(change.dtypes)
            for name, (leaves, structure) in change.parts.items():
                leaves = [_kept(next(arrays), next(dtypes)) if is_array(leaf) else leaf for leaf in leaves]
                _set_part(change.object, name, jax.tree.unflatten(structure, leaves))

    def _change(self, x: object) -> _Change | None:
        now, given = _parts(x), self._given.get(id(x))
        if given is None:
            return _Change(x, now, (), [None] * _count_arrays(now), is_new=True)
        parts = {name: part for name, part in now.items() if not _same(part, given.get(name))}
        removed = tuple(name for name in given if name not in now)
        if not parts and not removed:
            return None
        stored = self._entries[id(x)].stored
        dtypes = [
            dtype for name, part in parts.items() for dtype in _kept_dtypes(part, given.get(name), stored.get(name))
        ]
        return _Change(x, parts, removed, dtypes, is_new=False)

    def _explain(self, error: Exception) -> None:
        """Raises nnx's own error again, with the object's path, if the search could not reach the object."""
        if type(error).__name__ != "TraceContextError":
            return
        x = _refused(error)
        path, _ = self._foreign.get(id(x), ("", None))
        if id(x) in self._entries or not is_nnx(x):
            return
        name = f"{type(x).__name__} {path!r}" if path else _description(x)
        advice = (
            "it belongs to an outer transformation"
            if path
            else "autocast did not find it in the arguments, nor in what the function closes over"
        )
        raise type(error)(f"Cannot mutate {name} within autocast: {advice}; pass its module as an argument") from error


def is_boxed(x: object) -> bool:
    """Returns whether a variable is one of nnx's hijax variables, which jax itself carries out of traces."""
    return is_nnx_variable(x) and flax_nnx().Variable not in type(x).__mro__


def is_at_home(x: Any) -> bool:
    """Returns whether nnx lets an object change in the current trace."""
    if not is_nnx_variable(x):
        return all(state.trace_state.is_valid() for state in _trace_states(x).values())
    try:
        x.set_raw_value(x.get_raw_value())
    except Exception as error:
        if type(error).__name__ == "TraceContextError":
            return False
        raise
    return True


def states_at_home(tree: PyTree) -> Any:
    """Returns a tree in which `nnx.State`s of another trace are copies that belong to the current one."""
    nnx = flax_nnx()
    if nnx is None:
        return tree

    def copy(x: object) -> Any:
        if not isinstance(x, nnx.State):
            return x
        variables = jax.tree.leaves(x, is_leaf=is_nnx_variable)
        foreign = any(is_nnx_variable(v) and not is_at_home(v) for v in variables)
        return jax.tree.map(lambda leaf: leaf, x) if foreign else x

    return jax.tree.map(copy, tree, is_leaf=lambda x: is_nnx(x) or isinstance(x, nnx.State))


def _trace_states(x: object) -> dict[str, Any]:
    """Returns the attributes by which nnx knows the trace of an object."""
    parts = vars(x).items()  # checked by type, because an nnx.Rngs has an attribute of every name
    return {name: value for name, value in parts if hasattr(type(value), "trace_state")}


def _home(x: Any) -> dict[str, Any]:
    return x.__getstate__() if is_nnx_variable(x) else dict(vars(x))


def _put_home(x: Any, home: dict[str, Any]) -> None:
    if is_nnx_variable(x):
        x.__setstate__(home)
        return
    vars(x).clear()
    vars(x).update(home)


def _move_here(x: Any) -> None:
    """Makes an object belong to the current trace."""
    if is_nnx_variable(x):
        twin = x.from_metadata(x.get_raw_value(), x.get_metadata())
        x.__setstate__(twin.__getstate__())
        return
    # Rebuilt, because then its state belongs to the current trace.
    vars(x).update(jax.tree.map(lambda leaf: leaf, _trace_states(x)))


def _parts(x: object) -> _Parts:
    return {name: jax.tree.flatten(part, is_leaf=is_nnx) for name, part in contents(x).items()}


def _same(part: tuple[list[Any], Any], other: tuple[list[Any], Any] | None) -> bool:
    return other is not None and part[1] == other[1] and all(x is y for x, y in zip(part[0], other[0], strict=True))


def _set_part(x: Any, name: str, value: Any) -> None:
    if not is_nnx_variable(x):
        vars(x)[name] = value
    elif name:
        x.set_metadata(value)
    else:
        x.set_raw_value(value)


def _count_arrays(parts: _Parts) -> int:
    return sum(is_array(leaf) for leaves, _ in parts.values() for leaf in leaves)


def _kept_dtypes(part: Any, given: Any, stored: Any) -> list[Any]:
    """Returns the dtype in which each new array is stored: an array that had one before keeps it.

    The trace sees a half array as float32. A dtype changed by the function itself is kept.
    """
    leaves, structure = part
    if given is None or stored is None or not structure == given[1] == stored[1]:
        return [None] * sum(map(is_array, leaves))
    return [
        old.dtype if is_array(traced) and leaf.dtype == traced.dtype else leaf.dtype
        for leaf, traced, old in zip(leaves, given[0], stored[0], strict=True)
        if is_array(leaf)
    ]


def _kept(array: jax.Array, dtype: DTypeLike) -> Any:
    array = jnp.asarray(array)
    is_float = jnp.issubdtype(array.dtype, jnp.floating)
    return array if dtype is None or not is_float else lax.convert_element_type(array, dtype)


def _refused(error: Exception) -> Any:
    """Returns the object that nnx refused to change."""
    traceback, found = error.__traceback__, None
    while traceback is not None:
        candidate = traceback.tb_frame.f_locals.get("self")
        found = candidate if is_nnx(candidate) else found
        traceback = traceback.tb_next
    return found


def _description(x: Any) -> str:
    value: Any = x.get_raw_value() if is_nnx_variable(x) else None
    shape = f" of {value.dtype}{list(value.shape)}" if is_array(value) else ""
    return f"a {type(x).__name__}{shape}"
