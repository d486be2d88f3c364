"""Checks of loss scales and their arguments; errors name the argument, or the missing parts of a loss scale.

Bad values raise ValueError whatever their type, so that users catch one class. Warnings point to the user's line.
"""

import math
from typing import Any, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np

from jmp_train.policies.autocasting import warn_user
from jmp_train.policies.loss_scaling.loss_scale import LARGEST_SCALE, SMALLEST_SCALE, LossScale
from jmp_train.policies.pytrees import check_number, named_leaves, plain
from jmp_train.policies.types import PyTree

_METHODS = ("scale", "unscale", "adjust")


def check_range(name: str, value: float) -> None:
    """Raises unless a value is a scale that has an inverse."""
    check_number(name, value)
    value = plain(value)
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


def _warn_if_inexact(name: str, value: float) -> None:
    if math.frexp(value)[0] != 0.5:
        warn_user(f"{name}={value} is not a power of two: scaling and unscaling will round", UserWarning)


def is_loss_scale(x: object) -> TypeGuard[LossScale]:
    """Returns whether `x` has the names of a `LossScale`, without computing anything, whatever the leaves are.

    Example:
      >>> from jmp_train.policies import NoOpLossScale
      >>> is_loss_scale(NoOpLossScale()), is_loss_scale(NoOpLossScale), is_loss_scale(8.0)
      (True, False, False)
    """
    return not isinstance(x, type) and not _missing(x)


def _missing(x: object) -> list[str]:
    """Returns the names of a loss scale that an object lacks."""
    kind = type(x)  # a property of the instance would be computed, possibly on shapes or shardings
    has_number = hasattr(kind, "loss_scale") or "loss_scale" in getattr(x, "__dict__", ())
    return [*([] if has_number else ["loss_scale"]), *(f"{name}()" for name in _missing_methods(kind))]


def _missing_methods(kind: type) -> list[str]:
    return [name for name in _METHODS if not callable(getattr(kind, name, None))]


def check_loss_scale(scale: object, hint: str) -> None:
    """Raises an error unless an object can scale gradients.

    Args:
      scale: the argument `loss_scale`, or one of a `PerLossScale`.
      hint: source of a loss scale, for the message.

    Raises:
      TypeError: the value lacks a name of a `LossScale`, or is not a pytree of numbers; the message names it.
      ValueError: its scale is a Python number that is not finite and above 0.
    """
    text = repr(scale)
    given = text if len(text) < 200 else f"a {type(scale).__name__}"  # possibly parameters or a model
    what = f"loss_scale must be a LossScale, got {given}"
    if isinstance(scale, type) and not _missing_methods(scale):
        raise TypeError(f"{what}, a class; pass an instance: {scale.__name__}(...)")
    if missing := _missing(scale):
        if len(missing) <= len(_METHODS):  # it was intended as a loss scale
            listed = " and ".join(filter(None, (", ".join(missing[:-1]), missing[-1])))
            raise TypeError(f"{what}, whose class {type(scale).__name__} has no {listed}")
        raise TypeError(f"{what}; {hint}")
    if jax.tree_util.all_leaves([scale]):
        raise TypeError(
            f"{what}, whose class {type(scale).__name__} is not a pytree; register it, for example with "
            "jax.tree_util.register_dataclass"
        )
    for path, x in named_leaves(scale):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float):
            raise TypeError(
                f"{what}, whose leaf {path!r} is not a number or array; mark settings as static with "
                "dataclasses.field(metadata={'static': True})"
            )
    number = scale.loss_scale if is_loss_scale(scale) else None
    if isinstance(number, int | float) and not 0 < number < math.inf:
        raise ValueError(f"loss_scale={number!r} must be a finite number above 0")


def check_adjusted(new: PyTree, old: PyTree) -> None:
    """Raises TypeError if the result of `adjust` cannot replace the old loss scale in a compiled step.

    Args:
      new: the result of `adjust`.
      old: the loss scale before.
    """
    name = f"loss_scale: {type(old).__name__}.adjust"
    structures = [jax.tree_util.tree_structure(tree) for tree in (new, old)]
    if structures[0] != structures[1]:
        raise TypeError(
            f"{name} must return a scale of the same structure, got\n  {structures[0]}\nfrom\n  {structures[1]}"
        )
    for (path, x), (_, y) in zip(named_leaves(new), named_leaves(old), strict=True):
        kinds = [f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}" for leaf in (x, y)]
        if kinds[0] != kinds[1]:
            raise TypeError(f"{name} must keep shapes and dtypes; it changed {path!r} from {kinds[1]} to {kinds[0]}")
