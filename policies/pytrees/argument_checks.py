"""Checks of single arguments: numbers, counts, flags, choices and paths. Errors name the argument and its value.

Bad values raise ValueError whatever their type, so that users catch one class; a path of another type, TypeError.
"""

import math
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.core import Tracer


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer other than a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Returns whether a value is a real number of Python or NumPy, and not a bool."""
    return isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)


def plain(value: Any) -> Any:
    """Returns the number in an array without dimensions; other values unchanged."""
    is_array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
    return value.item() if is_array and not value.shape else value


def check_number(name: str, value: Any, wanted: str = "a finite number", *, above: float = -math.inf) -> None:
    """Raises unless a value is a finite number of Python, NumPy or jax above a bound, and not a bool."""
    value = plain(value)
    if not is_number(value) or not above < value < math.inf:  # supports integers of any length
        raise ValueError(f"{name}={shown(value)} must be {wanted}")


def check_count(name: str, value: Any, least: int = 1) -> None:
    """Raises unless a value is an integer of at least 1, or another bound."""
    if not is_integer(value) or value < least:
        raise ValueError(f"{name}={shown(value)} must be an integer of at least {least}")


def check_flag(name: str, value: object) -> None:
    """Raises unless a value is a bool of Python, NumPy or jax, or 0 or 1, which configuration files and `int` give.

    Example:
      >>> check_flag("enabled", np.ones(2))
      Traceback (most recent call last):
      ValueError: enabled=an array of shape (2,) must be True or False
    """
    found = plain(value)
    if not isinstance(found, bool | np.bool_) and not (is_integer(found) and found in (0, 1)):
        raise ValueError(f"{name}={shown(value)} must be True or False")


def check_choice(name: str, value: object, choices: Sequence[Any]) -> None:
    """Raises unless a value is one of the choices; 1 is not True."""
    if not any(isinstance(value, type(choice)) and value == choice for choice in choices):
        raise ValueError(f"{name}={shown(value)} must be one of {', '.join(map(repr, choices))}")


def checked_path(name: str, value: object) -> Path:
    """Returns a path that is given as text or as `os.PathLike`; raises if it is something else, or empty.

    Example:
      >>> checked_path("directory", 3)
      Traceback (most recent call last):
      TypeError: directory=3 must be a path
    """
    if not isinstance(value, str | os.PathLike) or not isinstance(path := os.fspath(value), str):
        raise TypeError(f"{name}={shown(value)} must be a path")
    if not path:
        raise ValueError(f"{name} is an empty path")
    return Path(path)


def shown(value: object) -> str:
    """Returns the text of a value in an error: short, and for an array its shape."""
    if isinstance(value, Tracer):
        return f"a traced {jax.typeof(value)}"
    if isinstance(value, np.ndarray | jax.Array) and value.shape:
        return f"an array of shape {value.shape}"
    return reprlib.repr(value)
