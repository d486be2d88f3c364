"""Finds values computed from integers, and checks whether a half type keeps them distinct.

Positions, timesteps and counts are integers until a model converts them. Moving, adding and scaling them keeps them
distinct. float16 holds whole numbers up to 2048 and bfloat16 up to 256; above that, neighbors round to the same number.
Other operations end the tracking: the sine of a position, or the result of an activation function, is an ordinary
number.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.literal_bounds import by_name, fits


@dataclasses.dataclass(frozen=True)
class Integers:
    """Multiples of a step within an interval, possibly scaled by an array afterwards.

    Attributes:
      low: the least value; -inf if unknown.
      high: the greatest value; inf if unknown.
      step: all values are multiples of it, up to one common offset.
    """

    low: float
    high: float
    step: float = 1.0

    @property
    def greatest(self) -> float:
        """The greatest magnitude."""
        return max(abs(self.low), abs(self.high))

    def held_by(self, half: DTypeLike) -> bool:
        """Returns whether a half type keeps the values distinct, without overflow or underflow."""
        steps = 2.0 ** (jnp.finfo(half).nmant + 1)
        return self.greatest <= steps * self.step and fits((0.0, self.greatest), half, scales=True)


@dataclasses.dataclass(frozen=True)
class Operand:
    """Known facts about an operand.

    Attributes:
      integers: the integers that it was computed from; None if there are none.
      given: True if it was computed from literals, or is an argument or a constant, possibly moved.
      number: the value of a scalar literal; None otherwise.
    """

    integers: Integers | None
    given: bool
    number: float | None


def operand(atom: Var | Literal, known: Integers | None, *, weak: bool, given: bool) -> Operand:
    """Returns the known facts about an operand, from its variable or literal and from its value."""
    integers = known if weak else integers_of(atom, known)
    return Operand(integers, weak or given, _number(atom))


def _number(atom: Var | Literal) -> float | None:
    value = atom.val if isinstance(atom, jex.Literal) else None
    if value is None or np.ndim(value) or np.iscomplexobj(value):
        return None
    return float(value) if math.isfinite(value) else None


def integers_of(atom: Var | Literal, known: Integers | None) -> Integers | None:
    """Returns the integers that an operand was computed from: the known ones, or all integers of its type."""
    dtype = getattr(atom.aval, "dtype", None)
    if known is not None or dtype is None:
        return known
    if dtype == np.bool_:
        return Integers(0.0, 1.0)
    if not jnp.issubdtype(dtype, jnp.integer):
        return None
    limits = jnp.iinfo(dtype)
    if limits.bits > 16:  # for positions and counts, nothing more is known
        return Integers(-math.inf, math.inf)
    return Integers(float(limits.min), float(limits.max))


def integers_in_result(equation: JaxprEqn, operands: Sequence[Operand]) -> Integers | None:
    """Returns the integers that an equation's result was computed from; None if there are none."""
    function = _OF_RESULTS.get(equation.primitive.name)
    if len(equation.outvars) > 1 and equation.primitive.name not in ("split", "unstack"):
        return None  # several operands, each moved on its own
    found = None if function is None else function(equation, *operands)
    if found is None or math.isnan(found.greatest) or not found.step > 0:
        return None
    return found


def _counted(equation: JaxprEqn, *_: Operand) -> Integers:
    return Integers(0.0, max(0.0, equation.params["shape"][equation.params["dimension"]] - 1.0))


def _converted(equation: JaxprEqn, a: Operand) -> Integers | None:
    limits = integers_of(equation.outvars[0], None)
    if a.integers is None or limits is None:
        return a.integers
    within = limits.low <= a.integers.low and a.integers.high <= limits.high
    return dataclasses.replace(a.integers, step=1.0) if within else limits


def _moved(_: object, *operands: Operand) -> Integers | None:
    """Returns the integers of all operands together; operands without integers do not count."""
    found = [operand.integers for operand in operands if operand.integers is not None]
    if not found:
        return None
    return Integers(min(one.low for one in found), max(one.high for one in found), min(one.step for one in found))


def _first(equation: JaxprEqn, operand: Operand, *_: Operand) -> Integers | None:
    return _moved(equation, operand)


def _negative(_: object, a: Operand) -> Integers | None:
    return a.integers and Integers(-a.integers.high, -a.integers.low, a.integers.step)


def _magnitude(_: object, a: Operand) -> Integers | None:
    return a.integers and Integers(0.0, a.integers.greatest, a.integers.step)


def _sum(_: object, a: Operand, b: Operand) -> Integers | None:
    if a.integers is not None and b.integers is not None:
        step = min(a.integers.step, b.integers.step)
        return Integers(a.integers.low + b.integers.low, a.integers.high + b.integers.high, step)
    one, other = (a, b) if a.integers is not None else (b, a)
    if one.integers is None or not other.given:
        return None
    offset = other.number or 0.0
    return Integers(one.integers.low + offset, one.integers.high + offset, one.integers.step)


def _difference(equation: JaxprEqn, a: Operand, b: Operand) -> Integers | None:
    number = None if b.number is None else -b.number
    return _sum(equation, a, dataclasses.replace(b, integers=_negative(equation, b), number=number))


def _scaled(integers: Integers, factor: float) -> Integers:
    ends = sorted((integers.low * factor, integers.high * factor))
    return Integers(ends[0], ends[1], integers.step * abs(factor))


def _product(_: object, a: Operand, b: Operand) -> Integers | None:
    if a.integers is not None and b.integers is not None:
        greatest = _times(a.integers.greatest, b.integers.greatest)
        low = 0.0 if min(a.integers.low, b.integers.low) >= 0 else -greatest
        return Integers(low, greatest, a.integers.step * b.integers.step)
    one, other = (a, b) if a.integers is not None else (b, a)
    if one.integers is None or not other.given:
        return None
    return _scaled(one.integers, other.number) if other.number else one.integers


def _times(a: float, b: float) -> float:
    return a * b if a and b else 0.0  # not NaN if one is inf


def _quotient(equation: Any, a: Operand, b: Operand) -> Integers | None:
    if a.integers is None or not (b.given or b.integers is not None):
        return None
    if not b.number:
        return a.integers
    quotient = _scaled(a.integers, 1 / b.number)
    whole = jnp.issubdtype(equation.outvars[0].aval.dtype, jnp.integer)
    return dataclasses.replace(quotient, step=1.0) if whole else quotient


def _remainder(equation: JaxprEqn, a: Operand, b: Operand) -> Integers | None:
    if a.integers is None or not b.number:
        return _first(equation, a)
    greatest = min(abs(b.number), a.integers.greatest)
    return Integers(0.0 if a.integers.low >= 0 else -greatest, greatest, a.integers.step)


def _power(equation: JaxprEqn, a: Operand) -> Integers | None:
    if a.integers is None or (y := equation.params.get("y", 2)) < 1:
        return None
    low = 0.0 if y % 2 == 0 or a.integers.low >= 0 else -(a.integers.greatest**y)
    return Integers(low, a.integers.greatest**y, a.integers.step**y)


def _total(equation: Any, a: Operand) -> Integers | None:
    if a.integers is None:
        return None
    size = math.prod(equation.invars[0].aval.shape)
    count = max(1, size // max(1, math.prod(equation.outvars[0].aval.shape)))
    if equation.primitive.name == "cumsum":
        count = max(1, equation.invars[0].aval.shape[equation.params["axis"]])
    return Integers(
        min(a.integers.low, _times(a.integers.low, count)),
        max(a.integers.high, _times(a.integers.high, count)),
        a.integers.step,
    )


_OF_RESULTS: dict[str, Callable[..., Integers | None]] = {
    **by_name(
        "reshape transpose broadcast_in_dim squeeze expand_dims rev slice copy copy_p stop_gradient pvary pcast "
        "reduce_precision concatenate pad split unstack tile stack floor ceil round",
        _moved,
    ),
    "iota": _counted,
    "convert_element_type": _converted,
    **by_name("gather dynamic_slice sort", _first),
    "dynamic_update_slice": lambda equation, a, b, *_: _moved(equation, a, b),
    "select_n": lambda equation, _, *cases: _moved(equation, *cases),
    "neg": _negative,
    "abs": _magnitude,
    **by_name("add add_any", _sum),
    "sub": _difference,
    "mul": _product,
    "div": _quotient,
    "rem": _remainder,
    **by_name("integer_pow square", _power),
    **by_name("reduce_sum cumsum", _total),
}
