"""Decides the rule of each operation and the dtypes of its operands.

`steps_of` makes the decisions that do not depend on values, before the equations run. `settle` completes each of them
from the operands.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_train.policies.autocasting.fp8 import E4M3, place_of
from jmp_train.policies.autocasting.literal_bounds import fits
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    CALLS,
    EACH,
    EXCHANGES,
    PRODUCTS,
    PROMOTE,
    TRANSCENDENTAL,
    is_complex,
    multiplies,
    opened,
    precisions_of,
    programs_in,
)
from jmp_train.policies.autocasting.readers import logits_of, readers_of
from jmp_train.policies.autocasting.region import Region, contracts_one, in_8_bits, join
from jmp_train.policies.autocasting.rules import Rule
from jmp_train.policies.autocasting.values import FLOAT32, HALVES, Value, chosen, eligible, traced_dtype

COMPLEX = "complex numbers have no half type"  # a reason
_PASSES_ON = frozenset(CALLS) | {"logistic"}  # `jax.nn.sigmoid` is a call


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """An equation, and the decisions on it.

    Attributes:
      equation: the equation.
      scope: the names of the scopes around it, within the program.
      rule: the rule from a table, None if no table has one; after `settle`, the rule by which the equation runs.
      reason: the reason for the rule.
      place: for products in 8 bits, the name under which their scales are stored; otherwise "".
      in_float32: True if all readers of its result compute in float32.
      in_half: True if all readers of its result compute in half, and the gradient of at least one needs the result.
      is_logits: True for a product that only a softmax in float32 reads.
      is_added: True if its result is only added, so that no gradient needs it.
      dtypes: the dtype of each operand, None for unchanged. They depend on values; see `settle`.
    """

    equation: JaxprEqn
    scope: str
    rule: Rule | None
    reason: str
    place: str
    in_float32: bool
    in_half: bool
    is_logits: bool
    is_added: bool
    dtypes: Sequence[Any] = ()


def steps_of(region: Region, jaxpr: Jaxpr) -> list[Step]:
    """Returns the steps of a program in order, with all decisions that do not depend on values."""
    readers, logits = readers_of(region, jaxpr), logits_of(region, jaxpr)
    return [
        Step(
            equation,
            str(equation.source_info.name_stack),
            *region.rule_of(equation),
            place,
            in_float32=not readers.in_float32.isdisjoint(equation.outvars)
            or (equation.primitive.name in _PASSES_ON and not region.read_in_float32.isdisjoint(equation.outvars[:1])),
            in_half=not readers.in_half.isdisjoint(equation.outvars),
            is_logits=not logits.isdisjoint(equation.outvars),
            is_added=not readers.only_add.isdisjoint(equation.outvars),
        )
        for equation, place in zip(jaxpr.eqns, _places(region, jaxpr), strict=True)
    ]


def _places(region: Region, jaxpr: Jaxpr) -> list[str]:
    """Returns one place per equation: "" unless it may be or hold a product in 8 bits with scales from outside."""
    counts: Counter[str] = Counter()
    may_multiply = {"dot_general", *region.handlers} if region.delayed else ()
    return [
        place_of(equation, join("", str(equation.source_info.name_stack)), region.place, counts)
        if equation.primitive.name in may_multiply
        else ""
        for equation in jaxpr.eqns
    ]


def settle(region: Region, step: Step, inputs: list[Value]) -> Step:
    """Returns the step with its final rule and the dtypes of its operands."""
    equation, rule, reason = step.equation, step.rule, step.reason
    name, atoms = equation.primitive.name, equation.invars
    if is_entered(region, step, inputs):
        rule, reason = "keep", f"{name} is not entered"

    def settled(dtypes: list[Any], rule: Rule, reason: str) -> Step:
        return dataclasses.replace(step, dtypes=dtypes, rule=rule, reason=reason)

    touched = [eligible(traced_dtype(atom)) for atom in atoms]
    as_it_is = [None] * len(inputs)
    as_traced = [traced_dtype(atom) if touch else None for atom, touch in zip(atoms, touched, strict=True)]
    if name in EACH and rule is None and any(touched):
        return settled(as_it_is, "promote", "each operand by itself")
    if any(map(is_complex, atoms)):
        return settled(as_traced, *(("float32", reason) if rule == "float32" else ("keep", COMPLEX)))
    if not any(touched) or not all(_touchable(atom) for atom in atoms):
        return settled(as_traced, "keep", "no operand that autocast touches")
    if name == "convert_element_type" and rule in (None, "lower"):
        return settled(as_it_is, "promote", "explicit conversion")
    if rule is None and _is_square(equation):
        rule, reason = "float32", "a square"
    if rule is None:
        is_known = name in PROMOTE or name in EXCHANGES
        rule, reason = ("promote", "elementwise") if is_known else ("keep", f"{name} is not known")
    if rule == "fp8" and not all(x.integers is None or x.integers.held_by(E4M3) for x in inputs):
        rule, reason = "lower", f"primitive {name!r}"
    if rule in ("lower", "fp8") and not _can_lower(equation):
        rule, reason = "keep", "its precision is spelled out"
    if reason == f"primitive {name!r}" and name in PRODUCTS:
        if not integers_fit(region, inputs):
            rule, reason = "float32", "operand from integers"
        elif contracts_one(equation) and _all_float32(chosen(inputs, touched)):
            rule, reason = "promote", "outer product"
    if rule == "keep":
        return settled(as_traced, rule, reason)

    target = FLOAT32 if rule == "float32" else region.half
    if rule in ("promote", "demote"):
        target = _common(region, step, chosen(inputs, touched), demote=rule == "demote")
    dtypes = [target if touch else None for touch in touched]
    if _holds_typed_body(equation) and dtypes != as_traced:
        return settled(as_traced, "keep", "its body is typed")
    if rule == "lower" and step.is_logits:
        reason = f"{reason}, logits of a softmax"
    return settled(dtypes, rule, reason)


def is_entered(region: Region, step: Step, inputs: list[Value]) -> bool:
    """Returns whether an equation holds a program that must run by rules instead of as it was traced."""
    name = step.equation.primitive.name
    if name not in region.handlers or step.rule == "keep":
        return False
    if step.rule != "float32" or name == "remat2":
        return True
    dtypes = [*map(traced_dtype, step.equation.invars), *(value.dtype for value in inputs)]
    if any(dtype in HALVES for dtype in dtypes):  # gradients store half values as half; they are upcast within
        return True
    if region.word_of(step.equation)[0] == "tf32":
        return False
    bodies = programs_in(step.equation)  # whose products must get a precision
    find = functools.partial(multiplies, by_default=True)
    return any(region.remembered("multiplies", body, functools.partial(find, body)) for body in bodies)


def _is_square(equation: JaxprEqn) -> bool:
    name, atoms = equation.primitive.name, equation.invars
    if name == "integer_pow":
        return equation.params["y"] == 2
    return name == "square" or (name == "mul" and atoms[0] is atoms[1])


def can_take(rule: Rule, equation: JaxprEqn) -> bool:
    """Returns whether an equation may run by a rule, as far as its operands' traced dtypes and its programs tell."""
    if rule == "fp8":
        return in_8_bits(equation)
    refuses = _holds_typed_body(equation) or not _can_lower(equation)
    return not (rule == "lower" and (refuses or any(map(is_complex, equation.invars))))


def _touchable(atom: Var | Literal) -> bool:
    """Returns whether an operand is eligible, or has a dtype that is compatible with any float."""
    dtype = traced_dtype(atom)
    if dtype is None:
        return False
    return eligible(dtype) or not (jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jax.dtypes.extended))


def _can_lower(equation: JaxprEqn) -> bool:
    return all(part is None or isinstance(part, lax.Precision) for part in precisions_of(equation))


def _holds_typed_body(equation: JaxprEqn) -> bool:
    """Returns whether an equation holds a program that computes, such as a reducer."""
    params = equation.params.items()
    held = [x for name, value in params if "jaxpr" in name for x in jax.tree.leaves(value)]
    return any(opened(jaxpr).eqns for jaxpr in held)


def _common(region: Region, step: Step, floats: list[Value], *, demote: bool) -> Any:
    """Returns the common dtype of floating operands."""
    equation: Any = step.equation
    name = equation.primitive.name
    demote = demote and equation.outvars[0].aval.shape != ()
    if name in TRANSCENDENTAL | ARITHMETIC | {"logistic"} and step.in_float32:
        return FLOAT32  # every reader of the result would upcast it
    if name == "add" and (bias := _bias_dtype(equation, floats)) is not None:
        return bias
    if not literals_fit(region, equation, floats) or (demote and not integers_fit(region, floats)):
        return FLOAT32
    strong = {value.dtype for value in floats if not value.weak}
    strong = strong or {value.dtype for value in floats}
    if demote and region.half in strong:
        return region.half
    return strong.pop() if len(strong) == 1 else FLOAT32


def literals_fit(region: Region, equation: JaxprEqn, inputs: list[Value]) -> bool:
    """Returns whether the half type can hold the operands that were computed from literals."""
    scales = equation.primitive.name in ("mul", "div", "dot_general")
    return all(fits(x.bounds, region.half, scales=scales) for x in inputs if x.weak)


def integers_fit(region: Region, inputs: list[Value]) -> bool:
    """Returns whether the half type keeps the integers distinct that operands were computed from."""
    return all(x.integers is None or x.integers.held_by(region.half) for x in inputs)


def _all_float32(floats: list[Value]) -> bool:
    """Returns whether no operand is half already, or a mask."""
    return all(value.dtype == FLOAT32 and not value.weak for value in floats)


def _bias_dtype(equation: Any, floats: list[Value]) -> Any:
    """Returns the dtype of a product if the other operand is its bias, a broadcast parameter."""
    size = int(np.prod(equation.outvars[0].aval.shape))
    for product, bias in (floats, floats[::-1]):
        if product.product and bias.origin is not None and bias.origin < size:
            return product.dtype
    return None
