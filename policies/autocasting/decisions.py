"""Decides the rule of each operation and the dtypes of its operands.

`steps_of` makes the decisions that do not depend on values, before the equations run. `settle` completes each of them
from the operands.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_train.policies.autocasting.fp8 import Recipe, place_of
from jmp_train.policies.autocasting.literal_bounds import fits
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    CALLS,
    EACH,
    ENTERED,
    EXCHANGES,
    LIMITS,
    PRODUCTS,
    PROMOTE,
    TRANSCENDENTAL,
    is_complex,
    multiplies,
    precisions_of,
)
from jmp_train.policies.autocasting.readers import logits_of, readers_of
from jmp_train.policies.autocasting.region import Cause, Reason, Region, contracts_one, in_8_bits, is_batched
from jmp_train.policies.autocasting.rules import FEW_BITS_PRODUCTS, Rule
from jmp_train.policies.autocasting.values import FLOAT32, HALVES, Value, eligible, traced_dtype
from jmp_train.policies.programs import join, opened, programs_in

_PASSES_ON = frozenset(CALLS) | LIMITS | {"logistic"}  # `jax.nn.sigmoid` is a call


@dataclasses.dataclass(frozen=True, slots=True)
class RuledEquation:
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
    reason: Reason
    place: str
    in_float32: bool
    in_half: bool
    is_logits: bool
    is_added: bool
    dtypes: Sequence[Any] = ()


def steps_of(region: Region, jaxpr: Jaxpr) -> dict[int, RuledEquation]:
    """Returns the steps of a program by the identity of the equation, with decisions that do not depend on values."""
    readers, logits = readers_of(region, jaxpr), logits_of(region, jaxpr)
    return {
        id(equation): RuledEquation(
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
    }


def _places(region: Region, jaxpr: Jaxpr) -> list[str]:
    """Returns one place per equation: "" unless it may hold a product with scales from outside or a random key."""
    counts: Counter[str] = Counter()
    may_multiply = {*FEW_BITS_PRODUCTS, *ENTERED} if region.delayed or region.recipe.stochastic else ()
    return [
        place_of(equation, join("", str(equation.source_info.name_stack)), region.place, counts)
        if equation.primitive.name in may_multiply
        else ""
        for equation in jaxpr.eqns
    ]


def settle(region: Region, step: RuledEquation, inputs: list[Value]) -> RuledEquation:
    """Returns the step with its final rule and the dtypes of its operands."""
    atoms, name = step.equation.invars, step.equation.primitive.name
    touched = [eligible(traced_dtype(atom)) for atom in atoms]
    case = _Case(region, step, inputs, name, step.rule, touched, any(map(is_complex, atoms)))
    _, rule, cause = next(row for row in _SETTLED if row[0](case))
    rule, reason = rule or step.rule, step.reason if cause is None else Reason(cause, name)
    if rule == "lower" and step.is_logits:
        reason = dataclasses.replace(reason, of_logits=True)
    if cause is Cause.ACTIVATIONS and region.refused is not None:
        region.refused.append(step.equation)
    return dataclasses.replace(step, rule=rule, reason=reason, dtypes=_dtypes(case, rule, cause))


class _Case(NamedTuple):
    """A step with its operands."""

    region: Region
    step: RuledEquation
    inputs: list[Value]
    name: str  # of the primitive
    rule: Rule | None  # from a table
    touched: list[bool]  # the operands that autocast may cast
    is_complex: bool

    @property
    def floats(self) -> list[Value]:
        """The operands that autocast may cast."""
        return list(compress(self.inputs, self.touched))

    def is_product_by_primitive(self) -> bool:
        """Returns whether this is a product with a rule for all products, or for those in 8 bits."""
        return self.name in PRODUCTS and (self.step.reason.cause is Cause.PRIMITIVE or self.rule == "fp8")


# The first row whose predicate holds decides: on the rule, and the cause. None stands for those from a table.
_SETTLED: tuple[tuple[Callable[[_Case], bool], Rule | None, Cause | None], ...] = (
    (lambda c: c.rule is None and c.name in EACH and any(c.touched), "promote", Cause.EACH_OPERAND),
    (lambda c: c.is_complex and (c.rule != "float32" or is_entered(*c[:3])), "keep", Cause.COMPLEX),
    (lambda c: c.is_complex, "float32", None),
    (lambda c: not any(c.touched) or not all(map(_touchable, c.step.equation.invars)), "keep", Cause.UNTOUCHED),
    (lambda c: is_entered(*c[:3]), "keep", Cause.NOT_ENTERED),
    (lambda c: c.rule in (None, "lower") and c.name == "convert_element_type", "promote", Cause.CONVERSION),
    (lambda c: c.rule is None and _is_square(c.step.equation), "float32", Cause.SQUARE),
    (lambda c: _is_typed(c.step.equation) and _is_cast(c), "keep", Cause.TYPED_BODY),
    (lambda c: c.rule is None and (c.name in PROMOTE or c.name in EXCHANGES), "promote", Cause.ELEMENTWISE),
    (lambda c: c.rule is None, "keep", Cause.NOT_KNOWN),
    (lambda c: c.rule in ("lower", "fp8") and not _can_lower(c.step.equation), "keep", Cause.OWN_PRECISION),
    (lambda c: c.is_product_by_primitive() and not integers_fit(c.region, c.floats), "float32", Cause.INTEGERS),
    (lambda c: c.is_product_by_primitive() and _is_outer_in_float32(c), "promote", Cause.OUTER_PRODUCT),
    (lambda c: c.rule == "fp8" and not _held_by(c.region.recipe.holds, c.floats), "lower", Cause.PRIMITIVE),
    (lambda c: c.rule == "fp8" and _is_of_activations(c), "lower", Cause.ACTIVATIONS),
    (lambda _: True, None, None),
)


def _is_of_activations(case: _Case) -> bool:
    """Returns whether a product has batch dimensions but no weight, as attention's, and no rule of its own."""
    has_rule = case.step.reason.cause is Cause.OPERATION
    return is_batched(case.step.equation) and not has_rule and not any(x.given for x in case.floats)


def _is_cast(case: _Case) -> bool:
    """Returns whether the rule of an equation, or promotion without one, casts operands from their traced dtypes."""
    rule = case.rule or ("promote" if case.name in PROMOTE else "keep")
    return _dtypes(case, rule) != _dtypes(case, "keep")


def _dtypes(case: _Case, rule: Rule | None, cause: Cause | None = None) -> list[Any]:
    """Returns the dtype of each operand by a rule, None for unchanged."""
    if cause in (Cause.EACH_OPERAND, Cause.CONVERSION):
        return [None] * len(case.inputs)
    if rule == "keep" or case.is_complex:
        pairs = zip(case.step.equation.invars, case.touched, strict=True)
        return [traced_dtype(atom) if touch else None for atom, touch in pairs]
    target = FLOAT32 if rule == "float32" else case.region.half
    if rule in ("promote", "demote"):
        target = _common(case.region, case.step, list(compress(case.inputs, case.touched)), demote=rule == "demote")
    return [target if touch else None for touch in case.touched]


def is_entered(region: Region, step: RuledEquation, inputs: list[Value]) -> bool:
    """Returns whether an equation holds a program that must run by rules instead of as it was traced."""
    name = step.equation.primitive.name
    if name not in ENTERED or step.rule == "keep":
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


def can_take(rule: Rule, equation: JaxprEqn, recipe: Recipe) -> bool:
    """Returns whether an equation may run by a rule, as far as its operands' traced dtypes and its programs tell."""
    if rule == "fp8":
        return in_8_bits(equation, recipe)
    refuses = _is_typed(equation) or not _can_lower(equation)
    return not (rule == "lower" and (refuses or any(map(is_complex, equation.invars))))


def _touchable(atom: Var | Literal) -> bool:
    """Returns whether an operand is eligible, or has a dtype that is compatible with any float."""
    dtype = traced_dtype(atom)
    if dtype is None:
        return False
    return eligible(dtype) or not (jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jax.dtypes.extended))


def _can_lower(equation: JaxprEqn) -> bool:
    return all(part is None or isinstance(part, lax.Precision) for part in precisions_of(equation))


def _is_typed(equation: JaxprEqn) -> bool:
    """Returns whether an equation holds a program that computes, such as a reducer."""
    params = equation.params.items()
    held = [x for name, value in params if "jaxpr" in name for x in jax.tree.leaves(value)]
    return any(opened(jaxpr).eqns for jaxpr in held)


def _common(region: Region, step: RuledEquation, floats: list[Value], *, demote: bool) -> Any:
    """Returns the common dtype of floating operands."""
    equation: Any = step.equation
    name = equation.primitive.name
    demote = demote and equation.outvars[0].aval.shape != ()
    if name in TRANSCENDENTAL | ARITHMETIC | LIMITS | {"logistic"} and step.in_float32:
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
    return _held_by(region.half, inputs)


def _held_by(dtype: Any, inputs: list[Value]) -> bool:
    return all(x.integers is None or x.integers.held_by(dtype) for x in inputs)


def _is_outer_in_float32(case: _Case) -> bool:
    """Returns whether a product contracts one number, and no operand is half already, or a mask."""
    floats = list(compress(case.inputs, case.touched))
    return contracts_one(case.step.equation) and all(x.dtype == FLOAT32 and not x.weak for x in floats)


def _bias_dtype(equation: Any, floats: list[Value]) -> Any:
    """Returns the dtype of a product if the other operand is its bias, a broadcast parameter."""
    size = int(np.prod(equation.outvars[0].aval.shape))
    for product, bias in (floats, floats[::-1]):
        if product.product and bias.origin is not None and bias.origin < size:
            return product.dtype
    return None
