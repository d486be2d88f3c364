"""Stores structures of pytrees as JSON without pickle: each node as the name of its class, literals and children.

A class is looked up among the loaded ones, or in packages with common containers of batches. jax must know it as a
pytree node. Nothing else is imported, and no code of the file runs.
"""

import ast
import importlib
import sys
from typing import Any

from jax.tree_util import PyTreeDef, default_registry

_IMPORTED = ("jmp_train.graphs.", "jraph.", "flax.core.")
_LEAF = "*"


def structure_to_json(structure: Any) -> Any:
    """Returns a structure as JSON data; None if it has a node whose fields are not literals.

    Example:
      >>> import jax
      >>> structure_to_json(jax.tree.structure({"x": (1, None)}))
      ['builtins:dict', "['x']", [['builtins:tuple', 'None', ['*', ['builtins:NoneType', 'None', []]]]]]
    """
    node = structure.node_data()
    if node is None:
        return _LEAF
    kind, static = node
    children = [structure_to_json(child) for child in structure.children()]
    if None in children or not _is_literal(static):
        return None
    return [f"{kind.__module__}:{kind.__qualname__}", repr(static), children]


def structure_from_json(described: Any) -> Any:
    """Returns the structure described by `structure_to_json`.

    Raises:
      ValueError: a class is not loaded, or is no pytree node.
    """
    make = PyTreeDef.from_node_data_and_children  # pyright: ignore[reportAttributeAccessIssue]
    if described == _LEAF:
        return make(default_registry, None, [])
    name, static, children = described
    kind, rest = _class_of(name), [structure_from_json(child) for child in children]
    try:
        return make(default_registry, (kind, ast.literal_eval(static)), rest)
    except (RuntimeError, ValueError, TypeError) as error:
        raise ValueError(f"jax knows no node {name}: {error}") from None


def _is_literal(x: object) -> bool:
    try:
        found = ast.literal_eval(repr(x))
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False
    return type(found) is type(x) and found == x


def _class_of(name: str) -> type[Any]:
    module, _, path = name.partition(":")
    if name == "builtins:NoneType":
        return type(None)
    if module not in sys.modules and f"{module}.".startswith(_IMPORTED):
        importlib.import_module(module)
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise ValueError(f"the class {name} is not loaded: import its module, or pass like=a batch of that structure")
    return found
