"""Checks that jax has the names that rules use, and finds the nearest names for those that it lacks."""

import difflib
import functools
import importlib
import os
from collections.abc import Collection, Iterable

import jax
import jax.extend.core as jex

# Primitives that jax registers late, or only in older releases.
_ELSEWHERE = "pallas_call pjit"
_MODULES = (
    "jax.numpy jax.numpy.linalg jax.numpy.fft jax.nn jax.lax jax.lax.linalg jax.random jax.image "
    "jax.scipy.linalg jax.scipy.special jax.scipy.signal jax.scipy.stats"
)
_LONG, _NEAR = 8, 0.85  # least length and similarity of a function's name to count as a misspelling
_SHOWN = 3


def check_primitive(name: str) -> None:
    """Raises ValueError if neither jax nor an extension has registered a primitive with this name.

    Args:
      name: a name in a table of rules.

    Example:
      >>> check_primitive("exp")
      >>> check_primitive("expo")
      Traceback (most recent call last):
          ...
      ValueError: primitives: jax has no primitive 'expo'; the nearest are 'exp', 'exp2', 'expm1'
    """
    known = _primitives()
    if name not in known:
        other = f". {name!r} is a function of jax: functions={{{name!r}: ...}}" if name in _functions() else ""
        raise ValueError(f"primitives: jax has no primitive {name!r}{_nearest_text(name, known)}{other}")


def check_function(name: str) -> None:
    """Raises ValueError if a name looks like a misspelled jax function, or names a module that jax lacks.

    Any other name may belong to a jitted function of the user.

    Args:
      name: a name in a table of rules.

    Example:
      >>> check_function("attend")
      >>> check_function("log_softmaks")
      Traceback (most recent call last):
          ...
      ValueError: functions: jax has no function 'log_softmaks'; the nearest are 'log_softmax'...
    """
    if name.startswith("jax."):
        _check_module(name)
        return
    plain, known = _plain(name), _functions()
    if len(plain) < _LONG or plain in {_plain(other) for other in known}:
        return
    near = [other for other in difflib.get_close_matches(name, known, _SHOWN, _NEAR) if _plain(other) not in plain]
    if near:
        raise ValueError(
            f"functions: jax has no function {name!r}; the nearest are {_quoted(near)}. For a function of your own of "
            "that name, use jax.named_scope and `paths`"
        )


def is_function_of_jax(name: str) -> bool:
    """Returns whether a name in a table of functions names a public function or a module of jax."""
    return name.startswith("jax.") or _plain(name) in {_plain(other) for other in _functions()}


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Returns the known names most similar to a name: at most three, those with a common prefix first.

    Args:
      name: the unknown name.
      known: all known names.

    Example:
      >>> nearest("dot", ["dot_general", "exp"]), nearest("tahn", ["tanh", "exp"])
      (['dot_general'], ['tanh'])
    """
    known = sorted(known)
    begins = [other for other in known if len(min(name, other, key=len)) > 2 and _begin_alike(name, other)]
    begins.sort(key=lambda other: abs(len(other) - len(name)))
    return list(dict.fromkeys([*begins, *difflib.get_close_matches(name, known, _SHOWN)]))[:_SHOWN]


def _begin_alike(first: str, second: str) -> bool:
    return first.startswith(second) or second.startswith(first)


def _plain(name: str) -> str:
    return name.replace("_", "").lower()


def _nearest_text(name: str, known: Collection[str]) -> str:
    near = nearest(name, known)
    return f"; the nearest are {_quoted(near)}" if near else ""


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names))


def _check_module(name: str) -> None:
    """Raises ValueError if jax has no such module; the source files of jax count as its modules."""
    *parents, last = name.split(".")[1:]
    roots = [os.path.join(os.path.dirname(jax.__file__), folder, *parents) for folder in ("", "_src")]
    known = {entry.removesuffix(".py") for root in roots if os.path.isdir(root) for entry in os.listdir(root)}
    if last not in known:
        raise ValueError(f"functions: jax has no module {name!r}{_nearest_text(last, known)}")


def _primitives() -> frozenset[str]:
    """Returns the names of the primitives that jax lists, or that have a derivative or batching rule."""
    from jax.interpreters import ad, batching

    registered = (*ad.primitive_jvps, *ad.primitive_transposes, *batching.fancy_primitive_batchers)
    listed = vars(importlib.import_module("jax.extend.core.primitives")).values()
    primitives = (x for x in (*registered, *listed) if isinstance(x, jex.Primitive))
    return frozenset(primitive.name for primitive in primitives).union(_ELSEWHERE.split())


@functools.cache
def _functions() -> frozenset[str]:
    """Returns the names of jax's public functions."""
    modules = map(importlib.import_module, _MODULES.split())
    return frozenset(
        name
        for module in modules
        for name in dir(module)
        if not name.startswith("_") and callable(getattr(module, name, None))
    )
