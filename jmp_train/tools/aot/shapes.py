"""Trees of arrays as shapes, and the leaves that are arguments of a program."""

import sys
from typing import Any, TypeGuard

import jax

_NUMBERS = bool | int | float | complex


def shapes_of(tree: Any) -> Any:
    """Returns a tree with its arrays and numbers as `jax.ShapeDtypeStruct`; all other leaves stay.

    Other leaves, such as the activation functions and names in equinox modules, are constants for the
    program; so are numbers in such modules, as in `eqx.filter_jit`.

    Args:
      tree: a pytree.

    Example:
      >>> import numpy as np
      >>> shapes_of({"w": np.zeros((2, 3), np.float32), "activation": max})
      {'activation': <built-in function max>, 'w': ShapeDtypeStruct(shape=(2, 3), dtype=float32)}
    """
    return jax.tree.map(_shapes_of_node, tree, is_leaf=_is_equinox)


def is_shape(leaf: object) -> TypeGuard[jax.ShapeDtypeStruct]:
    """Returns whether a leaf of the result of `shapes_of` is an argument of the program.

    Example:
      >>> is_shape(shapes_of(3.0)), is_shape(shapes_of("train"))
      (True, False)
    """
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _shapes_of_node(node: Any) -> Any:
    if _is_equinox(node):
        return jax.tree.map(lambda x: x if isinstance(x, _NUMBERS) else _shape_of(x), node)
    return _shape_of(node)


def _shape_of(leaf: Any) -> Any:
    if not (is_shape(leaf) or isinstance(leaf, _NUMBERS) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))):
        return leaf
    struct: Any = leaf if is_shape(leaf) else jax.eval_shape(lambda: leaf)
    return jax.ShapeDtypeStruct(struct.shape, struct.dtype, weak_type=struct.weak_type)  # without its placement here


def _is_equinox(node: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)
