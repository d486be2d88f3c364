"""Finds the source line of an equation of a traced program, and the address by which rules match it."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_OURS = os.path.dirname(os.path.dirname(__file__))  # the folder of this package
_JAX = os.path.dirname(jax.__file__)
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def source_of(equations: Sequence[Any]) -> str:
    """Returns the innermost source line outside of jax.

    Args:
      equations: nested equations, the outermost first.
    """
    return next(_frames(equations), "")


def user_line_of(equations: Sequence[Any]) -> str:
    """Returns the innermost source line outside of installed packages, or otherwise outside of jax.

    Args:
      equations: see `source_of`.
    """
    outside = (line for line, is_installed in lines_of(equations) if not is_installed)
    return next(outside, source_of(equations))


def is_of_users(file: str) -> bool:
    """Returns whether a file belongs neither to jax, nor to this package, nor to an installed package.

    Args:
      file: the name of the file.
    """
    return not file.startswith((_JAX, _OURS, "<frozen", *_LIBRARIES))


def lines_of(equations: Sequence[Any]) -> Iterator[tuple[str, bool]]:
    """Yields the source lines of an equation, the innermost first, and whether each is in an installed package.

    Args:
      equations: see `source_of`.
    """
    return ((line, line.startswith(_LIBRARIES)) for line in _frames(equations))


def _frames(equations: Sequence[Any]) -> Iterator[str]:
    """Yields the source lines of nested equations, the innermost line first."""
    for equation in reversed(equations):
        traceback = equation.source_info.traceback
        for frame in () if traceback is None else traceback.frames:  # jit drops callers of the functions it traces
            if not frame.file_name.startswith((_JAX, _OURS, "<frozen")):
                yield f"{frame.file_name}:{frame.line_num}"


def address_of(equations: Sequence[Any], path: str) -> str:
    """Returns the address that `AutocastRules.operations` matches: `path:primitive@file.py:line`.

    If the innermost line is in an installed package, the user's line follows: ` from file.py:line`.

    Args:
      equations: see `source_of`; the operation itself is the last one.
      path: the path of modules and scopes.
    """
    inner, outer = source_of(equations), user_line_of(equations)
    return f"{path}:{equations[-1].primitive.name}@{inner}" + (f" from {outer}" if outer != inner else "")
