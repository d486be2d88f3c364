"""Finds the user's source line: of an equation, with the address by which rules match it, and for warnings."""

import contextlib
import os
import sys
import sysconfig
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jax.extend.source_info_util import user_context

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))  # jmp_train
_OURS = tuple(os.path.join(_PACKAGE, folder) for folder in ("policies", "tools"))  # what transforms functions
_JAX = os.path.dirname(jax.__file__)
_LIBRARIES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
_NOT_WARNED = (_PACKAGE, _JAX, sysconfig.get_path("stdlib"), "<frozen")


def source_of(equations: Sequence[Any]) -> str:
    """Returns the innermost source line outside of jax.

    Args:
      equations: nested equations, the outermost first.
    """
    return next(_frames(equations), "")


def at_line_of(equation: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes compilers and profilers name the user's line: the equation's, or else the call of the region."""
    if not source_of([equation]):
        return contextlib.nullcontext()
    return user_context(equation.source_info.traceback)


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
    return not file.startswith((_JAX, *_OURS, "<frozen", *_LIBRARIES))


def is_of_jax(file: str) -> bool:
    """Returns whether a file belongs to jax."""
    return file.startswith(_JAX)


def is_of_package(file: str) -> bool:
    """Returns whether a file belongs to this package."""
    return file.startswith(_PACKAGE)


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
            if not frame.file_name.startswith((_JAX, *_OURS, "<frozen")):
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


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the innermost line outside of installed packages; if there is none, outside of jax and this one.

    Args:
      text: text of the warning.
      category: its class.
    """
    files = []
    frame = sys._getframe(1)
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    outside = [i for i, file in enumerate(files) if not file.startswith(_NOT_WARNED)]
    users = [i for i in outside if not files[i].startswith(_LIBRARIES)]
    warnings.warn(text, category, stacklevel=2 + next(iter(users or outside), 0))
