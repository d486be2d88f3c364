"""Finding a wrapper's state in any nesting of optax's combinators."""

from collections.abc import Callable
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


def change_states(opt_state: Any, kind: type[State], change: Callable[[State], State]) -> Any:
    """Returns an optimizer's state with every outermost state of a kind changed."""

    def is_of_kind(node: Any) -> bool:
        return isinstance(node, kind)

    return jax.tree_util.tree_map(
        lambda node: change(node) if is_of_kind(node) else node, opt_state, is_leaf=is_of_kind
    )
