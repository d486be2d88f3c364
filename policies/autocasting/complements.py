"""Finds values that a program subtracts from a constant.

`1 - a` keeps few digits of an `a` that half precision rounded near 1, as gates are: that of a GRU, a highway, a
hand-written cross-entropy. The function that makes `a` then runs in float32.
"""

from collections.abc import Callable
from typing import Any

import jax.extend.core as jex
import numpy as np
from jax.extend.core import Jaxpr

from jmp_train.policies.autocasting.primitives import ARITHMETIC, CALLS, LAYOUT, PICKS, names, results_inside
from jmp_train.policies.autocasting.values import variables_read
from jmp_train.policies.programs import bodies_of, opened

NEAR_A_CONSTANT = names("logistic tanh erf erfc cos sin exp exp2")  # functions whose values crowd there
_THROUGH = ARITHMETIC | LAYOUT | PICKS | names("square integer_pow abs max min clamp select_n concatenate pad split")


def complemented(remembered: Callable[..., Any], jaxpr: Jaxpr, results: frozenset[Any]) -> frozenset[Any]:
    """Returns the variables that a program subtracts from a constant, directly or through elementwise operations.

    Args:
      remembered: `Region.remembered`.
      jaxpr: the program.
      results: its results that are subtracted from a constant elsewhere.
    """
    return remembered(("complemented", results), jaxpr, lambda: _found(remembered, jaxpr, results))


def _found(remembered: Callable[..., Any], jaxpr: Jaxpr, results: frozenset[Any]) -> frozenset[Any]:
    found = set(results)
    constants = {e.outvars[0] for e in jaxpr.eqns if e.primitive.name == "broadcast_in_dim" and not variables_read(e)}
    for equation in reversed(jaxpr.eqns):
        name, read = equation.primitive.name, variables_read(equation)
        for body, operands in _bodies(equation):
            inside = complemented(remembered, body, results_inside(body, equation, found))
            pairs = zip(operands, body.invars, strict=True)
            found.update(x for x, inner in pairs if inner in inside and not _is_literal(x))
        if _subtracts_constant(equation, constants) or (name in _THROUGH and not found.isdisjoint(equation.outvars)):
            found.update(read)
    return frozenset(found)


def _bodies(equation: Any) -> list[tuple[Any, list[Any]]]:
    """Returns the programs that an equation holds, each with the operands that it reads, in order."""
    name = equation.primitive.name
    operands = equation.invars[1:] if name == "cond" else equation.invars
    is_entered = name in CALLS or name in ("scan", "remat2", "cond")
    return [(opened(body), operands) for body in bodies_of(equation)] if is_entered else []


def _subtracts_constant(equation: Any, constants: set[Any]) -> bool:
    """Returns whether an equation subtracts a constant from a value, or the value from it."""
    read = variables_read(equation)
    if equation.primitive.name == "sub":
        return len(read) == 1 or not constants.isdisjoint(read)
    return equation.primitive.name == "add" and len(read) == 1 and any(map(_is_negative, equation.invars))


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, jex.Literal)


def _is_negative(atom: Any) -> bool:
    return _is_literal(atom) and bool(np.all(np.real(atom.val) < 0))
