"""Finding a wrapper's state in any nesting of optax's combinators."""

from typing import Any, TypeVar

import jax

from jmp_train.policies.paths import path_name

State = TypeVar("State")


def find_states(opt_state: Any, kind: type[State]) -> list[tuple[str, State]]:
    """Returns (path, state) of every outermost state of a kind in any nesting."""
    nodes = jax.tree_util.tree_leaves_with_path(
        opt_state, is_leaf=lambda node: isinstance(node, kind)
    )
    return [(path_name(path), node) for path, node in nodes if isinstance(node, kind)]
