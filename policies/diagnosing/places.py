"""Where a line of code is, as people are told."""

import os


def place_of(file: str, line: int) -> str:
    """Returns file and line, from the current folder if it is below that.

    Args:
      file: its path.
      line: its number; 0 where it is not known.

    Example:
      >>> place_of("", 0)
      '?'
    """
    if not line:
        return "?"
    path = os.path.relpath(file)
    return f"{file if path.startswith('..') else path}:{line}"
