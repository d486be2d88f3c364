"""Traces calls of users' functions, as functions of arrays only, and explains the errors that tracing meets."""

import contextlib
import inspect
import linecache
import re
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jmp_train.policies.autocasting.source_lines import is_of_users
from jmp_train.policies.autocasting.values import float32_aval, replaced
from jmp_train.policies.pytrees import Carried, is_array, is_nnx, states_at_home

_ARRAY = object()  # marks an array among results that may be of any type
_NEEDS_A_VALUE = (
    jax.errors.ConcretizationTypeError,  # of bool, int and float
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_NAMES_ITS_LINE = "_jmp_train_names_the_line_that_needs_a_value"
_IS_KEY = re.compile(r"rng|seed|(^|_)keys?\d*$")
_ASKS_FOR_A_KEY = re.compile(r"rng|requires a key", re.IGNORECASE)
_IS_EXPLAINED = "_jmp_train_has_last_word_on_its_key"


class FlatCall:
    """The arguments of a call, flattened: arrays are inputs, everything else is constant.

    Args:
      args: pytrees; `jax.ShapeDtypeStruct` works in place of arrays.
      kwargs: keyword arguments, likewise.

    Attributes:
      avals: the types of the arrays, in the order of the leaves.
      are_arrays: one boolean per leaf, True for arrays.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._leaves, self._tree = jax.tree.flatten((args, kwargs))
        self.are_arrays = [is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct) for leaf in self._leaves]
        self.avals = [
            x if isinstance(x, jax.ShapeDtypeStruct) else jax.typeof(x) for x in compress(self._leaves, self.are_arrays)
        ]

    def arguments(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the arguments, with the given arrays in place of its own."""
        return jax.tree.unflatten(self._tree, replaced(self._leaves, self.are_arrays, arrays))

    def of_arrays(self, run: Callable[..., Any]) -> Callable[..., list[Any]]:
        """Returns a function that calls `run` with the given arrays and returns a list of arrays.

        The call leaves nnx objects that `run` closes over unchanged.
        """
        reachable = Carried((), run)

        def call(*arrays: object) -> list[Any]:
            args, kwargs = self.arguments(arrays)
            with reachable.at_home(), python_values_explained():
                results = jax.tree.leaves(run(*args, **kwargs))
            return [x for x in results if isinstance(x, jax.Array)]

        return call


def run_traced(
    run: Callable[[ClosedJaxpr, list[Any]], list[Any]],
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    as_float32: bool = True,
) -> Any:
    """Returns `fn(*args, **kwargs)`, traced in float32 and then run by another function.

    Args:
      run: runs the traced program on arrays.
      fn: a pure function.
      args: its arguments.
      kwargs: its keyword arguments.
      as_float32: False to trace it in the dtypes of its arguments.
    """
    args, kwargs = states_at_home((args, kwargs))
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_nnx)
    are_arrays = [is_array(leaf) for leaf in leaves]
    carried = Carried((args, kwargs), fn)
    arrays = [*compress(leaves, are_arrays), *carried.arrays]
    own = len(arrays) - len(carried.arrays)
    structure: list[Any] = []

    def flat(*arrays: object) -> list[Any]:
        args, kwargs = jax.tree.unflatten(tree, replaced(leaves, are_arrays, arrays[:own]))
        with carried.at_home(arrays[own:]), python_values_explained():
            returned = fn(*args, **kwargs)
            changed = carried.changed(returned)
        results, out_tree = jax.tree.flatten(returned, is_leaf=is_nnx)
        structure[:] = [out_tree, [_ARRAY if is_array(x) else x for x in results]]
        return [*filter(is_array, results), *changed]

    avals = map(jax.typeof, arrays)
    jaxpr = jax.make_jaxpr(flat)(*(map(float32_aval, avals) if as_float32 else avals))
    computed = map(jnp.asarray, run(jaxpr, arrays))
    out_tree, results = structure
    results = [next(computed) if x is _ARRAY else x for x in results]
    carried.write(computed)
    return jax.tree.unflatten(out_tree, results)


@contextlib.contextmanager
def python_values_explained() -> Iterator[None]:
    """Adds to jax's errors the user's line that needs a value, and the code to write instead."""
    try:
        yield
    except _NEEDS_A_VALUE as error:
        frames = traceback.extract_tb(error.__traceback__)
        line = next((frame for frame in reversed(frames) if is_of_users(frame.filename)), None)
        if line is not None and line.lineno is not None and not hasattr(error, _NAMES_ITS_LINE):
            setattr(error, _NAMES_ITS_LINE, True)
            code = linecache.getline(line.filename, line.lineno).strip()
            error.add_note(
                f"{line.filename}:{line.lineno}: `{code}` asks for the value of an array, which has none while the "
                "function is traced; jnp.where and jax.lax.cond need none"
            )
        raise


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
