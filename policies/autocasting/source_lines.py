"""Which line of whose code an equation of a traced program is from, and how rules address it."""

import os
import sysconfig
from collections.abc import Iterator, Sequence
from typing import Any

import jax

_OURS = os.path.dirname(os.path.dirname(__file__))  # the floor, whose rooms these are
_JAX = os.path.dirname(jax.__file__)
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def source_of(equations: Sequence[Any]) -> str:
    """Returns the line of the innermost equation that has one in code that is not jax's own.

    Args:
      equations: one within the other, the outermost first.
    """
    return next(_frames(equations), "")


def user_line_of(equations: Sequence[Any]) -> str:
    """Returns the user's line: the innermost one outside of all installed packages, else of any but jax.

    Args:
      equations: see `source_of`.
    """
    outside = (line for line, is_installed in lines_of(equations) if not is_installed)
    return next(outside, source_of(equations))


def is_of_users(file: str) -> bool:
    """Returns whether a file is neither jax's, nor ours, nor of an installed package.

    Args:
      file: its name.
    """
    return not file.startswith((_JAX, _OURS, "<frozen", *_LIBRARIES))


def lines_of(equations: Sequence[Any]) -> Iterator[tuple[str, bool]]:
    """Yields the lines of code that made an equation, the innermost first, and whether each is of an installed package.

    Args:
      equations: see `source_of`.
    """
    return ((line, line.startswith(_LIBRARIES)) for line in _frames(equations))


def _frames(equations: Sequence[Any]) -> Iterator[str]:
    """Yields the lines of equations, each within the one before it, the innermost line first."""
    for equation in reversed(equations):
        traceback = equation.source_info.traceback
        for frame in () if traceback is None else traceback.frames:  # of what jit traces none of its callers
            if not frame.file_name.startswith((_JAX, _OURS, "<frozen")):
                yield f"{frame.file_name}:{frame.line_num}"


def address_of(equations: Sequence[Any], path: str) -> str:
    """Returns by what `AutocastRules.operations` finds an operation: `path:primitive@file.py:line`.

    Where the innermost line is one of an installed package, the user's line follows: ` from file.py:line`.

    Args:
      equations: see `source_of`; the operation itself is the last one.
      path: of modules and scopes.
    """
    inner, outer = source_of(equations), user_line_of(equations)
    return f"{path}:{equations[-1].primitive.name}@{inner}" + (f" from {outer}" if outer != inner else "")
