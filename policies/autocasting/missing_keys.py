"""Explains errors of functions that lack a random key: names the argument that is None."""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

_IS_KEY = re.compile(r"rng|seed|(^|_)keys?\d*$")
_ASKS_FOR_A_KEY = re.compile(r"rng|requires a key", re.IGNORECASE)
_IS_EXPLAINED = "_jmp_train_has_last_word_on_its_key"


@contextlib.contextmanager
def missing_key_explained(why: Callable[[], str | None], *, is_last_word: bool = False) -> Iterator[None]:
    """Adds a reason to the error that a flax, haiku, equinox or jax model raises without a random key.

    Args:
      why: returns a sentence, or None if there is a key. It is called only after such an error.
      is_last_word: True to suppress the reasons that enclosing functions would add, if these would mislead.
    """
    try:
        yield
    except Exception as error:
        asks = not hasattr(error, _IS_EXPLAINED) and _ASKS_FOR_A_KEY.search(f"{type(error).__name__} {error}")
        reason = why() if asks else None
        if reason is not None and reason not in getattr(error, "__notes__", ()):
            error.add_note(reason)
        if reason is not None and is_last_word:
            setattr(error, _IS_EXPLAINED, True)
        raise


@contextlib.contextmanager
def none_key_explained(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Adds to the error of a function without a random key which argument is None.

    Args:
      fn: the function.
      args: its arguments.
      kwargs: its keyword arguments.
    """
    with missing_key_explained(lambda: _none_key(fn, args, kwargs or {})):
        yield


def argument_names(fn: Callable[..., Any], count: int) -> list[str]:
    """Returns the names of a function's first `count` arguments."""
    positional = [p.name for p in _parameters(fn) if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return [*positional, *(f"argument {i}" for i in range(len(positional), count))][:count]


def _none_key(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    """Returns which argument should be a key but is None, passed or by default; None if there is no such argument."""
    defaults = {p.name: p.default for p in _parameters(fn) if p.default is not p.empty}
    given = {**defaults, **dict(zip(argument_names(fn, len(args)), args, strict=True)), **kwargs}
    name = next((name for name, x in given.items() if x is None and _IS_KEY.search(name)), None)
    if name is None:
        return None
    some = "keys" if name.endswith("s") else "a key"
    such = '{"dropout": jax.random.key(0)} or nnx.Rngs(0)' if name.endswith("rngs") else "jax.random.key(0)"
    return f"the argument {name} is None: pass {some}, such as {such}"


def _parameters(fn: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    try:
        return tuple(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):  # only Python functions have a signature
        return ()
