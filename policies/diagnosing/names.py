"""The function or layer that the user called, such as `gelu` or `LayerNorm`, which contains a jax primitive."""

import os
import re

import jax
import jax.numpy as jnp
import optax

from jmp_train.policies.diagnosing.equations import Site, frames_of
from jmp_train.policies.diagnosing.evidence import Evidence

_JAX = os.path.dirname(jax.__file__)
_MODULES = (jax.nn, jnp.linalg, jax.scipy.special, jnp)
_LAYER = re.compile(r"([A-Z]\w*)\.__call__$")
_WORDS = {"convert_element_type": "cast to"}
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


def named(evidence: Evidence, row: int) -> str:
    """Returns a row's operation as users write it, `x**2`, or its primitive, with the called function and type.

    Args:
      evidence: the evidence of a diagnosis.
      row: number of the row.
    """
    found, site = evidence.rows[row], evidence.sites[row]
    params = site.equation.params
    operation = (
        f"x**{params['y']}" if found.primitive == "integer_pow" else _WORDS.get(found.primitive, found.primitive)
    )
    function = function_called(site)
    shape = ",".join(map(str, found.shape))
    whose = f"{function}'s " if function else ""
    return f"{whose}{operation} {found.dtype}[{shape}]"


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
