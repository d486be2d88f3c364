"""Descriptions of operations in the user's terms: the function that was called, an argument's cast, an update."""

import os
import re
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import optax

from jmp_train.tools.diagnosing.equations import LAYERS, Site, frames_of

_POLICIES = os.path.join("policies", "dtype_policies")
_STEPS = os.path.join("jmp_train", "steps")
_LOSS, _REDUCED = "float32_scalar", ("reduce_gradients", "scatter_gradients")
_JAX = os.path.dirname(jax.__file__)
_MODULES = (jax.nn, jnp.linalg, jax.scipy.special, jnp)
_LAYER = re.compile(r"([A-Z]\w*)\.__call__$")
_WRAPPERS = frozenset(("vectorize", "Module"))  # which call what the user has written
# Functions of one primitive, which says as much. Those of `_MODULES` that it is named for need no entry.
_PLAIN = frozenset(
    ("matmul", "power", "inner", "vdot", "einsum", "tensordot", "asarray", "array", "where", "clip", "astype")
)


def function_called(site: Site) -> str:
    """Returns the function or layer around an operation that the user's line called; empty if unknown.

    Args:
      site: the operation.
    """
    primitive = site.equation.primitive.name
    names = [name for file, function in frames_of(site) if (name := _public(file, function, primitive))]
    return names[-1] if names and site.line else ""


def _public(file: str, function: str, primitive: str) -> str:
    """Returns the public name of a frame's function, or the class of a layer; empty if it is not of interest."""
    if file.startswith(_JAX):
        is_plain = function in _PLAIN or function in primitive or primitive in function
        return function if not is_plain and function not in _WRAPPERS and _is_of_jax(function) else ""
    if layer := _LAYER.match(function):
        return layer[1] if layer[1] not in _WRAPPERS else ""
    return function if file.startswith(os.path.dirname(optax.__file__)) and hasattr(optax, function) else ""


def _is_of_jax(function: str) -> bool:
    found = next((getattr(module, function) for module in _MODULES if hasattr(module, function)), None)
    return callable(found) and not isinstance(found, jnp.ufunc | type)


def argument_of(site: Site, arguments: Mapping[int, str]) -> str:
    """Returns the path of the argument that an operation casts, in the forward pass; empty if it does not.

    Args:
      site: the operation.
      arguments: paths of the arguments by number.
    """
    if site.equation.primitive.name != "convert_element_type" or site.direction == "backward":
        return ""
    (source, *others) = site.sources or (0,)
    return "" if others or source >= 0 else arguments.get(-1 - source, "")


def is_by_policy(site: Site) -> bool:
    """Returns whether a policy, not the user, casts the arguments here."""
    return any(_POLICIES in file for file, _ in frames_of(site))


def is_of_graphs(site: Site) -> bool:
    """Returns whether the user called an operation on graphs, which stores rows in half precision."""
    return any(file.startswith(LAYERS) for file, _ in frames_of(site))


def is_reduction(site: Site) -> bool:
    """Returns whether the library averages gradients over devices here."""
    return any(function in _REDUCED for _, function in frames_of(site))


def is_loss(site: Site) -> bool:
    """Returns whether the train step casts the loss to float32 here, or its derivative back to half precision."""
    return any(function == _LOSS for _, function in frames_of(site))


def subject_of(
    site: Site, row: int, arguments: Mapping[int, str], results: Sequence[tuple[str, frozenset[int]]]
) -> str:
    """Returns the description of an operation without a line; empty if it has one.

    Args:
      site: the operation.
      row: number of the row.
      arguments: paths of the arguments by number.
      results: descriptions of the results, and the rows from which they come.
    """
    if site.line:
        return ""
    if path := argument_of(site, arguments):
        return f"the argument {path!r}"
    if is_loss(site):
        return "the loss" if site.direction == "forward" else "the derivative of the loss"
    if is_reduction(site):
        return "the mean of the gradients over the devices"
    ends = [name for name, rows in results if row in rows]
    if len(ends) == 1:
        return ends[0]
    if any(_STEPS in file for file, _ in frames_of(site)):
        return "the train step itself, outside of your functions"
    return "a cast of autocast's" if site.under_autocast else "an operation of which jax knows no line"
