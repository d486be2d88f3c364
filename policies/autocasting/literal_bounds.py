"""Bounds of values computed only from literals, to check whether a half type can hold them.

Bounds are pairs (least, greatest) of magnitudes; unknown bounds are (0, inf).
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

Function = TypeVar("Function")

Bounds = tuple[float, float]

UNKNOWN: Bounds = (0.0, math.inf)


def literal_bounds(value: object) -> Bounds:
    """Returns the bounds of a literal, without infinities and NaN, which half types can hold."""
    magnitudes = np.abs(np.asarray(value, np.complex128))
    finite = magnitudes[np.isfinite(magnitudes)]
    return (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)


def fits(bounds: Bounds, half: DTypeLike, *, scales: bool) -> bool:
    """Returns whether a half type holds values within the bounds without overflow or, if they scale, underflow."""
    greatest, limits = bounds[1], jnp.finfo(half)
    if scales and 0 < greatest < float(limits.smallest_normal):
        return False
    return greatest <= float(limits.max)


def result_bounds(equation: JaxprEqn, inputs: Sequence[Bounds]) -> Bounds:
    """Returns the bounds of an equation's result."""
    function = _OF_RESULTS.get(equation.primitive.name)
    if function is None or not inputs:
        return UNKNOWN
    try:
        least, greatest = function(equation, *inputs)
    except OverflowError:
        return UNKNOWN
    return UNKNOWN if math.isnan(least) or math.isnan(greatest) else (least, greatest)


def by_name(names: str, function: Function) -> dict[str, Function]:
    """Returns a dictionary that maps each of several names to one function."""
    return dict.fromkeys(names.split(), function)


def _any_of(_: object, *inputs: Bounds) -> Bounds:
    return min(least for least, _ in inputs), max(greatest for _, greatest in inputs)


def _converted(equation: JaxprEqn, a: Bounds) -> Bounds:
    to_float = jnp.issubdtype(equation.params["new_dtype"], jnp.floating)
    return a if to_float else (0.0, a[1])


def _sum(_: object, a: Bounds, b: Bounds) -> Bounds:
    return max(a[0] - b[1], b[0] - a[1], 0.0), a[1] + b[1]


def _product(_: object, a: Bounds, b: Bounds) -> Bounds:
    return a[0] * b[0], a[1] * b[1]


def _inverse(a: Bounds) -> Bounds:
    return 1 / a[1] if a[1] else math.inf, 1 / a[0] if a[0] else math.inf


def _power(equation: JaxprEqn, a: Bounds) -> Bounds:
    y = equation.params["y"]
    powers = (a[0] ** abs(y), a[1] ** abs(y))
    return powers if y >= 0 else _inverse(powers)


def _root(_: object, a: Bounds) -> Bounds:
    return math.sqrt(a[0]), math.sqrt(a[1])


def _logarithm(_: object, a: Bounds) -> Bounds:
    return (0.0, max(abs(math.log2(a[0])), abs(math.log2(a[1])))) if a[0] else UNKNOWN


def _total(equation: Any, a: Bounds) -> Bounds:
    return 0.0, a[1] * math.prod(equation.invars[0].aval.shape)


_OF_RESULTS: dict[str, Callable[..., Bounds]] = {
    **by_name(
        "reshape transpose broadcast_in_dim squeeze expand_dims rev slice copy copy_p stop_gradient "
        "pvary pcast neg abs concatenate max min clamp reduce_max reduce_min",
        _any_of,
    ),
    **by_name("pad select_n", lambda _, *inputs: (0.0, _any_of(_, *inputs)[1])),
    "convert_element_type": _converted,
    **by_name("add sub add_any", _sum),
    "mul": _product,
    "div": lambda _, a, b: _product(_, a, _inverse(b)),
    "integer_pow": _power,
    "square": lambda _, a: _product(_, a, a),
    "sqrt": _root,
    "rsqrt": lambda _, a: _inverse(_root(_, a)),
    **by_name("log log2", _logarithm),
    **by_name("exp", lambda _, a: (0.0, math.exp(a[1]))),
    **by_name("tanh logistic erf sin cos sign", lambda _, a: (0.0, 1.0)),
    **by_name("reduce_sum cumsum", _total),
}
