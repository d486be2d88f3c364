"""Casts of nnx objects by a policy: parameters in place, no other state."""

import contextlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jmp_train.policies.pytrees.casting import cast_like, is_float_array
from jmp_train.policies.pytrees.nnx_tracing import states_at_home
from jmp_train.policies.pytrees.tree_nodes import Search, flax_nnx, is_nnx, is_nnx_variable, is_parameter
from jmp_train.policies.types import PyTree

Cast = Callable[[Any], Any]


@contextlib.contextmanager
def cast_for_call(tree: PyTree, cast: Cast, also: Collection[int] = frozenset()) -> Iterator[Any]:
    """Yields a tree for a call, with its arrays and the nnx parameters in it cast.

    It contains the caller's own nnx objects and no copies, so that changes made by the call are kept. After
    the call, the parameters have their old values; a new value from the call is stored in the old dtype. A value
    equal to the cast one is not new, even if nnx's `jit` or `remat` within the call
    created new arrays. Other variables, such as batch statistics and random counts, are not
    parameters, and are not cast.

    Args:
      tree: a pytree.
      cast: returns a pytree with its arrays cast.
      also: the ids of variables that count as parameters, in addition to all `nnx.Param`s.
    """
    if flax_nnx() is None:
        yield cast(tree)
        return
    leaves, structure = jax.tree.flatten(states_at_home(tree), is_leaf=is_nnx)
    found = [_parameters(leaf, also) if is_nnx(leaf) else {} for leaf in leaves]
    values = [_values(leaf, inner) if is_nnx(leaf) else leaf for leaf, inner in zip(leaves, found, strict=True)]
    cast_values = structure.flatten_up_to(cast(jax.tree.unflatten(structure, values)))
    swaps: dict[int, tuple[Any, Any, Any]] = {}
    for inner, new in zip(found, cast_values, strict=True):
        for path, variable in inner.items():
            number = new[path] if path else new
            swaps.setdefault(id(variable), (variable, variable.get_raw_value(), number))
    cast_leaves = [leaf if is_nnx(leaf) else new for leaf, new in zip(leaves, cast_values, strict=True)]
    with _swapped(list(swaps.values())):
        yield jax.tree.unflatten(structure, cast_leaves)


def cast_results(tree: PyTree, cast: Cast) -> Any:
    """Returns a tree with its arrays and the nnx parameters and intermediates in it cast.

    Args:
      tree: a pytree. Its nnx objects and their other state stay unchanged.
      cast: returns a pytree with its arrays cast.
    """
    nnx = flax_nnx()
    if nnx is None:
        return cast(tree)

    def cast_node(x: object) -> Any:
        stays = is_nnx(x) and not isinstance(x, nnx.Param | nnx.Intermediate)
        return x if stays else cast(x)

    return jax.tree.map(cast_node, tree, is_leaf=is_nnx)


def _parameters(x: object, also: Collection[int]) -> dict[str, Any]:
    """Returns the parameters in an nnx object by path, or a parameter itself under the empty path."""
    search = Search()
    search.in_tree(x)
    return {path: y for path, y in search.found if is_parameter(y) or id(y) in also}


def _values(x: Any, parameters: dict[str, Any]) -> Any:
    """Returns a stand-in for an nnx object in a tree that is cast, which preserves the paths."""
    if is_nnx_variable(x):
        return x.get_raw_value() if parameters else None
    return {path: variable.get_raw_value() for path, variable in parameters.items()}


@contextlib.contextmanager
def _swapped(swaps: list[tuple[Any, Any, Any]]) -> Iterator[None]:
    """Gives variables other values within this context; each entry has the stored value and the other one."""
    try:
        for variable, _, new in swaps:
            _set(variable, new)
        yield
    finally:
        for variable, stored, new in swaps:
            now = variable.get_raw_value()
            _set(variable, stored if now is new else _kept(stored, new, now))


def _kept(stored: PyTree, new: PyTree, now: PyTree) -> Any:
    """Returns a parameter's stored value if it still holds the value given to the call, otherwise its current value."""
    structure = jax.tree.structure(now)
    if structure != jax.tree.structure(stored) or structure != jax.tree.structure(new):
        return now

    def keep(x: Any, given: Any, result: Any) -> Any:
        now_like = cast_like(result, x)
        floats = is_float_array(given) and is_float_array(result)
        alike = floats and (given.shape, given.dtype) == (result.shape, result.dtype)
        return jnp.where(result == given, x, now_like) if alike else now_like

    return jax.tree.map(keep, stored, new, now)


def _set(variable: Any, value: Any) -> None:
    """Sets a variable's value, even if only another trace may change it."""
    variable.__setstate__({**variable.__getstate__(), "_raw_value": value})
