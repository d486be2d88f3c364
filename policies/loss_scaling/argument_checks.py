"""Checks of the arguments of loss scales: each raises a ValueError that names the argument.

Bad values raise ValueError whatever their type, so that users catch one class. The functions that warn
must be called directly by the function that the user called, because the warning points to its caller.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from jmp_train.policies.loss_scaling.loss_scale import LARGEST_SCALE, SMALLEST_SCALE


def is_integer(value: object) -> bool:
    """Returns whether a value is an integer other than a bool."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def check_number(name: str, value: float) -> None:
    """Raises unless a value is a finite number of Python, NumPy or jax, and not a bool."""
    value = _plain(value)
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not number or not -math.inf < value < math.inf:  # supports integers of any length
        raise ValueError(f"{name}={value!r} must be a finite number")


def check_range(name: str, value: float) -> None:
    """Raises unless a value is a scale that has an inverse."""
    check_number(name, value)
    value = _plain(value)
    if not SMALLEST_SCALE <= value <= LARGEST_SCALE:
        raise ValueError(f"{name}={value!r} must be between 2**-126 and 2**126")


def check_scale(name: str, value: Any) -> None:
    """Raises unless a value is a scale that has an inverse; warns if it makes scaling round."""
    check_range(name, value)
    _warn_if_inexact(name, value)


def check_floor(name: str, value: float, start: float) -> None:
    """Raises unless a value is a scale of at most `start`."""
    check_range(name, value)
    if value > start:
        raise ValueError(f"{name}={value!r} must not exceed the initial scale, {start}")


def check_growth(name: str, value: float) -> None:
    """Raises unless a value is a factor above 1; warns if it makes scaling round."""
    check_range(name, value)
    if value <= 1:
        raise ValueError(f"{name}={value!r} must be above 1")
    _warn_if_inexact(name, value)


def check_backoff(name: str, value: float) -> None:
    """Raises unless a value is a factor between 0 and 1; warns if it makes scaling round."""
    check_range(name, value)
    if value >= 1:
        raise ValueError(f"{name}={value!r} must be below 1")
    _warn_if_inexact(name, value)


def check_count(name: str, value: int) -> None:
    """Raises unless a value is an integer of at least 1."""
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name}={value!r} must be an integer of at least 1")


def check_flag(name: str, value: object) -> None:
    """Raises unless a value is a bool."""
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r} must be True or False")


def check_choice(name: str, value: object, choices: Sequence[Any]) -> None:
    """Raises unless a value is one of the choices; 1 is not True."""
    if not any(value == choice and isinstance(value, type(choice)) for choice in choices):
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}")


def _plain(value: Any) -> Any:
    """Returns the number in an array without dimensions; other values unchanged."""
    is_array = isinstance(value, np.ndarray | jax.Array) and not isinstance(value, Tracer)
    return value.item() if is_array and not value.shape else value


def _warn_if_inexact(name: str, value: float) -> None:
    if math.frexp(value)[0] != 0.5:
        warnings.warn(f"{name}={value} is not a power of two: scaling and unscaling will round", stacklevel=4)
