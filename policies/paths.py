"""Names of leaves: one spelling of a pytree path for rules, reports and errors."""

from typing import Any

import jax
from jax.tree_util import GetAttrKey, KeyPath, keystr


def path_name(path: KeyPath) -> str:
    """Returns "encoder/layers/0/bias" for the path of a leaf of any pytree.

    flax nnx keeps an array in the attribute `value` of a variable; that last step is left out, so
    that the same rule finds the same parameter in linen, nnx, equinox and haiku.
    """
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return keystr(path, simple=True, separator="/")


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Returns (path name, leaf) of every leaf, in tree order."""
    return [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree)]
