"""The updates that pass through an optimizer's wrappers, noted by the wrappers while `check_nesting` traces a step.

optax's combinators are closures, and so are users' own: nobody can ask them for the optimizers that they hold.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Passed(NamedTuple):
    """The gradients and updates that passed through wrappers of an optimizer.

    Attributes:
      scaled: the scaled gradients that each `with_loss_scale` took.
      stored: the updates that each `StoringOptimizer` returned.
    """

    scaled: list[Any]
    stored: list[Any]


_PASSED: ContextVar[Passed | None] = ContextVar("passed updates", default=None)


@contextlib.contextmanager
def noted_updates() -> Iterator[Passed]:
    """Yields the notes of the wrappers called within this context, where `with_loss_scale` returns zeros."""
    passed = Passed([], [])
    token = _PASSED.set(passed)
    try:
        yield passed
    finally:
        _PASSED.reset(token)


def noting_scaled(update: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the `update` of a `with_loss_scale`, extended to record the gradients that it takes."""

    @functools.wraps(update)
    def noting(updates: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if (passed := _PASSED.get()) is None:
            return update(updates, state, params, **extra_args)
        passed.scaled.append(updates)
        return jax.tree_util.tree_map(jnp.zeros_like, params), state

    return noting


def note_stored(updates: Any) -> None:
    """Notes the updates that a `StoringOptimizer` returns."""
    if (passed := _PASSED.get()) is not None:
        passed.stored.append(updates)
