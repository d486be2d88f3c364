"""Warnings that point to the user's line, past the frames of libraries."""

import os
import sys
import sysconfig
import warnings

import jax

_OURS = os.path.dirname(os.path.dirname(__file__))  # jmp_train, whose folders the floors are
_SKIPPED = (_OURS, os.path.dirname(jax.__file__), sysconfig.get_path("stdlib"), "<frozen")
_PACKAGES = tuple({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})


def warn_user(text: str, category: type[Warning]) -> None:
    """Warns at the innermost line outside of installed packages; if there is none, outside of jax and this one.

    Args:
      text: of the warning.
      category: its class.
    """
    files = []
    frame = sys._getframe(1)
    while frame is not None:
        files.append(frame.f_code.co_filename)
        frame = frame.f_back
    found = _first(files, (*_SKIPPED, *_PACKAGES))
    if found is None:
        found = _first(files, _SKIPPED)
    warnings.warn(text, category, stacklevel=2 + (found or 0))


def _first(files: list[str], skipped: tuple[str, ...]) -> int | None:
    return next((i for i, file in enumerate(files) if not file.startswith(skipped)), None)
