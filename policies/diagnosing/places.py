"""The displayed place of a line of code."""

import os


def place_of(file: str, line: int) -> str:
    """Returns file and line, from the current folder if it is below that.

    Args:
      file: path of the file.
      line: number of the line; 0 if unknown.

    Example:
      >>> place_of("", 0)
      '?'
    """
    if not line:
        return "?"
    path = os.path.relpath(file)
    return f"{file if path.startswith('..') else path}:{line}"
