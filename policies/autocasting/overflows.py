"""Denominators that overflowed in half precision, computed again in float32.

A float32 number divided by a denominator that overflowed is 0: a plausible number, which hides the overflow. So values
remember the half operations that made them, and a float32 quotient runs those of its denominator again in float32.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.primitives import ARITHMETIC, LAYOUT, PICKS, PLACEMENT, names
from jmp_train.policies.autocasting.values import FLOAT32, Made, Value, upcast_operands

_MAY_OVERFLOW = ARITHMETIC | names("exp exp2")
_FOLLOWED = (
    (_MAY_OVERFLOW | LAYOUT | PICKS | names("reduce_max reduce_min square integer_pow sqrt abs"))
    | names("max min clamp select_n gt ge lt le concatenate pad split")
) - PLACEMENT  # which pass on what is known
_LONGEST = 32  # operations in a row


def note_operation(equation: JaxprEqn, half: DTypeLike, inputs: Sequence[Value], outputs: Sequence[Value]) -> None:
    """Records the operation that made its results, if half precision may have overflowed on the way."""
    name = equation.primitive.name
    if name not in _FOLLOWED:
        return
    depth = 1 + max((x.made.depth for x in inputs if x.made is not None), default=0)
    begins = name in _MAY_OVERFLOW and outputs[0].dtype == half
    if (begins or depth > 1) and depth <= _LONGEST:
        for position, output in enumerate(outputs):
            output.made = Made(equation, tuple(inputs), position, depth)


def without_overflow(equation: Any, dtypes: Sequence[Any], inputs: list[Value]) -> list[Value]:
    """Returns an equation's operands, in float32 all the way if it divides in float32 by what may have overflowed."""
    place = _denominator(equation, inputs)
    if place is None or dtypes[place] != FLOAT32 or inputs[place].made is None:
        return inputs
    made = [x.made for x in inputs if x.made is not None]
    run = jax.checkpoint(lambda: [_computed(x, {}) for x in made], prevent_cse=False)  # stores half values
    exact = iter(run())
    return [x if x.made is None else Value(next(exact)) for x in inputs]


def _denominator(equation: Any, inputs: Sequence[Value]) -> int | None:
    """Returns the place of the operand by which an equation divides."""
    match equation.primitive.name:
        case "div":
            return 1
        case "rsqrt":
            return 0
        case "integer_pow":
            return 0 if equation.params["y"] < 0 else None
        case "pow":
            exponent = inputs[1].array
            return 0 if isinstance(exponent, np.ndarray) and bool(np.all(exponent < 0)) else None
    return None


def _computed(made: Made, done: dict[int, Any]) -> Any:
    """Returns a value, computed in float32 by the operations that made it."""
    if id(made) not in done:
        equation = made.equation
        arrays = [x.array if x.made is None else _computed(x.made, done) for x in made.inputs]
        results = equation.primitive.bind(*upcast_operands(equation, arrays), **equation.params)
        done[id(made)] = results[made.position] if equation.primitive.multiple_results else results
    return done[id(made)]
