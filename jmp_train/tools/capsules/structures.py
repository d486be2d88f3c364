"""Structures of pytrees as JSON data, and back.

A class of a node is looked up among the loaded ones, or in packages with common containers of batches. jax must know it
as a pytree node. Nothing else is imported, no pickle is read, and no code of the file runs.
"""

import ast
import contextlib
import importlib
import operator
import sys
from typing import Any

from jax.tree_util import PyTreeDef, default_registry

from jmp_train.policies.files import printable

_IMPORTED = ("jmp_train.graphs.", "jraph.", "flax.core.")
_LEAF = "*"


def structure_to_json(structure: Any) -> Any:
    """Returns a structure as JSON data.

    Raises:
      ValueError: it has a node whose fields are not literals.

    Example:
      >>> import jax
      >>> structure_to_json(jax.tree.structure({"x": (1, None)}))
      ['builtins:dict', "['x']", [['builtins:tuple', 'None', ['*', None]]]]
    """
    node = structure.node_data()
    if node is None:
        return _LEAF
    kind, static = node
    if kind is type(None):
        return None
    found = ast.literal_eval(repr(static))
    if type(found) is not type(static) or found != static:
        raise ValueError(f"{static!r} is not a literal")
    children = [structure_to_json(child) for child in structure.children()]
    return [f"{kind.__module__}:{kind.__qualname__}", repr(static), children]


def structure_from_json(described: Any) -> Any:
    """Returns the structure described by `structure_to_json`; raises an error if it is none.

    Raises:
      ValueError: a class is not loaded, or is no pytree node.
    """
    make = PyTreeDef.from_node_data_and_children  # pyright: ignore[reportAttributeAccessIssue]
    if described == _LEAF:
        return make(default_registry, None, [])
    if described is None:
        return make(default_registry, (type(None), None), [])
    name, static, children = described
    kind, rest = _class_of(name), [structure_from_json(child) for child in children]
    try:
        data = ast.literal_eval(static)
        if kind is dict and (type(data) is not list or not len({*data}) == len(data) == len(rest)):
            raise ValueError("a dictionary does not have its own key for each value")
        return make(default_registry, (kind, data), rest)
    except (RuntimeError, ValueError, TypeError, SyntaxError, MemoryError) as error:
        raise ValueError(f"jax knows no node {printable(name)} with these fields: {printable(error)}") from None


def _class_of(name: str) -> type[Any]:
    module, _, path = name.partition(":")
    if f"{module}.".startswith(_IMPORTED):
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    found = None
    with contextlib.suppress(KeyError, AttributeError):
        found = operator.attrgetter(path)(sys.modules[module])
    if not isinstance(found, type):
        raise ValueError(
            f"the class {printable(name)} is not loaded: import its module, or pass like=a batch of that structure"
        )
    return found
