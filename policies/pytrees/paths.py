"""Paths of leaves as text, for rules, reports and errors."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.tree_util import GetAttrKey, KeyPath, keystr

from jmp_train.policies.types import PyTree


def path_name(path: KeyPath) -> str:
    """Returns "encoder/layers/0/bias" for the path of a leaf of any pytree.

    flax nnx stores an array in the attribute `value` of a variable; that last step is left out, so
    that the same rule matches the same parameter in linen, nnx, equinox and haiku.
    """
    if len(path) > 1 and path[-1] == GetAttrKey("value"):
        path = path[:-1]
    return keystr(path, simple=True, separator="/")


def check_regexes(rules: object) -> None:
    """Raises TypeError if rules are not a mapping from regular expressions, ValueError if one does not compile.

    Args:
      rules: a user's rules on paths.
    """
    if not isinstance(rules, Mapping):
        raise TypeError(
            f"rules must be a dict with regular expressions as keys, got {type(rules).__name__}; convert pairs with "
            "dict(rules)"
        )
    for regex in rules:
        if not isinstance(regex, str | re.Pattern):
            raise TypeError(f"rule {regex!r} is not a regular expression: it must be a string")
        try:
            re.compile(regex)
        except re.error as error:
            raise ValueError(f"rule {regex!r} is not a regular expression: {error}") from None


def check_rules(rules: Iterable[str], paths: Sequence[str], message: str) -> None:
    """Raises ValueError if a regular expression matches none of the paths.

    Args:
      rules: regular expressions, searched for in a path.
      paths: paths of the leaves.
      message: the error message, with "{}" in place of the rules without a match; the paths follow it.
    """
    unmatched = [regex for regex in rules if not any(re.search(regex, path) for path in paths)]
    if unmatched:
        found_nothing = message.format(", ".join(map(repr, unmatched)))
        raise ValueError(f"{found_nothing}; the paths are:\n  " + "\n  ".join(paths or ["(none)"]))


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Returns (path name, leaf) of every leaf, in tree order; `is_leaf` is that of `jax.tree`."""
    return [(path_name(path), x) for path, x in jax.tree_util.tree_leaves_with_path(tree, is_leaf)]
