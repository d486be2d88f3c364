"""The dtype in which autocast runs an operation, by its rule, its operands and what reads its result."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jmp_train.policies.autocasting.fp8 import E4M3
from jmp_train.policies.autocasting.literal_bounds import fits
from jmp_train.policies.autocasting.region import (
    ADDITIONS,
    ARITHMETIC,
    DECIDED,
    FLOAT32,
    LAYOUT,
    PLACEMENT,
    PRODUCTS,
    TRANSCENDENTAL,
    Region,
    Value,
    chosen,
    eligible,
    names,
    traced_dtype,
    variables_read,
)
from jmp_train.policies.autocasting.rules import Rule

# Elementwise and data-moving operations, whose floating operands have to agree.
_PROMOTE = (
    LAYOUT
    | ARITHMETIC
    | TRANSCENDENTAL
    | names(
        "rem max min sign abs floor ceil round is_finite tanh logistic erf erfc sqrt sin cos atan "
        "atan2 eq ne lt le gt ge select_n clamp concatenate pad stack unstack split "
        "dynamic_slice dynamic_update_slice gather scatter reduce_max reduce_min argmax argmin "
        "cummax cummin top_k reduce_window_max reduce_window_min real imag tile reduce_sum reduce_prod cumsum "
        "cumprod cumlogsumexp reduce_window_sum"
    )
)
# Exchanges between devices, whose gradients are exchanges again: those of others, such as all_gather, are sums.
EXCHANGES = names("all_to_all ppermute")
# Whose results are nothing but functions of their operands.
COMPUTED = (_PROMOTE | PRODUCTS) - PLACEMENT
_EACH = PLACEMENT | {"sort"}  # operands of which each has its own dtype
PICKS = frozenset(("gather", "dynamic_slice"))
_SHAPES = frozenset(("reshape", "squeeze"))


def settle(
    region: Region,
    equation: Any,
    inputs: list[Value],
    rule: Rule | None,
    reason: str,
    in_float32: frozenset[Any],
) -> tuple[list[Any], Rule, str]:
    """Returns the dtype of each operand, None for "as it is", and the rule and reason in the end."""
    name, atoms = equation.primitive.name, equation.invars
    touched = [eligible(traced_dtype(atom)) for atom in atoms]
    as_it_is = [None] * len(inputs)
    as_traced = [traced_dtype(atom) if touch else None for atom, touch in zip(atoms, touched, strict=True)]
    if name in _EACH and rule is None and any(touched):
        return as_it_is, "promote", "each operand by itself"
    if not any(touched) or not all(_touchable(atom) for atom in atoms):
        return as_traced, "keep", "no operand that autocast touches"
    if name == "convert_element_type" and rule in (None, "lower"):
        return as_it_is, "promote", "explicit conversion"
    if rule is None and _is_square(equation):
        rule, reason = "float32", "a square"
    if rule is None:
        is_known = name in _PROMOTE or name in EXCHANGES
        rule, reason = ("promote", "elementwise") if is_known else ("keep", f"{name} is not known")
    if rule == "fp8" and not all(x.integers is None or x.integers.held_by(E4M3) for x in inputs):
        rule, reason = "lower", f"primitive {name!r}"
    if rule in ("lower", "fp8") and not _can_lower(equation):
        rule, reason = "keep", "its precision is spelled out"
    if reason == f"primitive {name!r}" and name in PRODUCTS and not integers_fit(region, inputs):
        rule, reason = "float32", "operand from integers"
    if rule == "keep":
        return as_traced, rule, reason

    target = FLOAT32 if rule == "float32" else region.half
    if rule in ("promote", "demote"):
        floats = [value for value, touch in zip(inputs, touched, strict=True) if touch]
        demote = rule == "demote" and equation.outvars[0].aval.shape != ()
        target = _common(region, equation, floats, in_float32, demote=demote)
    dtypes = [target if touch else None for touch in touched]
    if _holds_typed_body(equation) and dtypes != as_traced:
        return as_traced, "keep", "its body is typed"
    return dtypes, rule, reason


def _is_square(equation: JaxprEqn) -> bool:
    name, atoms = equation.primitive.name, equation.invars
    if name == "integer_pow":
        return equation.params["y"] == 2
    return name == "square" or (name == "mul" and atoms[0] is atoms[1])


def _touchable(atom: Var | Literal) -> bool:
    """Whether an operand is eligible or of a dtype that goes along with any float."""
    dtype = traced_dtype(atom)
    if dtype is None:
        return False
    return eligible(dtype) or not (jnp.issubdtype(dtype, jnp.inexact) or jnp.issubdtype(dtype, jax.dtypes.extended))


def _can_lower(equation: JaxprEqn) -> bool:
    precision = equation.params.get("precision")
    parts = precision if isinstance(precision, tuple) else (precision,)
    return all(part is None or isinstance(part, lax.Precision) for part in parts)


def _holds_typed_body(equation: JaxprEqn) -> bool:
    """Whether it holds a program that computes, such as a reducer."""
    params = equation.params.items()
    held = [x for name, value in params if "jaxpr" in name for x in jax.tree.leaves(value)]
    return any(getattr(jaxpr, "jaxpr", jaxpr).eqns for jaxpr in held)


def _common(
    region: Region, equation: JaxprEqn, floats: list[Value], in_float32: frozenset[Any], *, demote: bool
) -> Any:
    """Returns the dtype in which operands meet."""
    name = equation.primitive.name
    if name in TRANSCENDENTAL | ARITHMETIC and all(out in in_float32 for out in equation.outvars):
        return FLOAT32  # all that reads the result would cast it up
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
    """Whether the half type can hold those operands of an equation that are made of literals."""
    scales = equation.primitive.name in ("mul", "div", "dot_general")
    return all(fits(x.bounds, region.half, scales=scales) for x in inputs if x.weak)


def integers_fit(region: Region, inputs: list[Value]) -> bool:
    """Whether the half type tells all integers apart that operands are made of."""
    return all(x.integers is None or x.integers.held_by(region.half) for x in inputs)


def _bias_dtype(equation: Any, floats: list[Value]) -> Any:
    """Returns a product's dtype if the other operand is its bias: a parameter that is broadcast."""
    size = int(np.prod(equation.outvars[0].aval.shape))
    for product, bias in (floats, floats[::-1]):
        if product.product and bias.origin is not None and bias.origin < size:
            return product.dtype
    return None


def wanted(
    region: Region,
    jaxpr: Jaxpr,
    rule: Rule,
    through: frozenset[str],
    results: frozenset[Any] = frozenset(),
) -> frozenset[Any]:
    """Returns the variables whose every reader computes by a rule, however they get there.

    Args:
      region: the region, which remembers the answer.
      jaxpr: the program.
      rule: "float32" or "lower".
      through: the primitives whose inputs are wanted as their results are.
      results: those of the program's results that are wanted so.
    """
    opened = getattr(jaxpr, "jaxpr", jaxpr)
    key = ("wanted", rule, through, results, region.settings)
    return region.remembered(key, opened, lambda: frozenset(_wanted(region, opened, rule, through, results)))


def _wanted(region: Region, jaxpr: Jaxpr, rule: Rule, through: frozenset[str], results: frozenset[Any]) -> set[Any]:
    found, read = set(results), set()
    if through >= PICKS:
        found |= _logarithms(region, jaxpr)
    added = only_added(region, jaxpr)
    refused = {atom for atom in jaxpr.outvars if not isinstance(atom, jex.Literal)} - results
    for equation in reversed(jaxpr.eqns):
        found.update(out for out in equation.outvars if out in read and out not in refused)
        variables = set(variables_read(equation))
        read |= variables
        follows = _follows(equation, through, added)
        refused |= variables - _wanted_by(region, equation, variables, found, rule, through, follows=follows)
    found.update(variable for variable in jaxpr.invars if variable in read - refused)
    return found


def _wanted_by(
    region: Region,
    reader: JaxprEqn,
    variables: set[Any],
    found: set[Any],
    rule: Rule,
    through: frozenset[str],
    *,
    follows: bool,
) -> set[Any]:
    """Returns those of the variables that an equation reads which it wants by a rule."""
    name, scope = reader.primitive.name, str(reader.source_info.name_stack)
    if DECIDED in scope:
        return set()
    decided, _ = region.decide(reader, scope)
    if decided is not None:
        return variables if decided == rule or (decided, rule) == ("fp8", "lower") else set()
    if name in ("jit", "pjit", "custom_jvp_call"):
        body = reader.params["call_jaxpr" if name == "custom_jvp_call" else "jaxpr"]
        body = getattr(body, "jaxpr", body)
        outs = frozenset(
            inner
            for inner, outer in zip(body.outvars, reader.outvars, strict=True)
            if outer in found and not isinstance(inner, jex.Literal)
        )
        inside = wanted(region.within(reader, scope), body, rule, through, outs)
        return _except_for(variables, reader, [inner not in inside for inner in body.invars])
    if name in PLACEMENT & through:
        return _except_for(variables, reader, [result not in found for result in reader.outvars])
    return variables if follows and all(x in found for x in reader.outvars) else set()


def _follows(reader: JaxprEqn, through: frozenset[str], added: frozenset[Any]) -> bool:
    """Whether an equation's inputs are wanted as its results are, of which some are only added."""
    name = reader.primitive.name
    if name in PICKS:
        return name in through and not _repeats(reader)
    return name in through or (name in _SHAPES and through >= PICKS and reader.outvars[0] in added)


def _repeats(pick: Any) -> bool:
    """Whether more values may be picked than there are, which would take more memory in float32."""
    try:
        return pick.outvars[0].aval.size > pick.invars[0].aval.size
    except jax.errors.InconclusiveDimensionOperation:  # of symbolic shapes
        return True


def only_added(region: Region, jaxpr: Jaxpr) -> frozenset[Any]:
    """Returns the variables of which there are only sums, whose gradients do not need them."""

    def find() -> frozenset[Any]:
        readers = [e for e in jaxpr.eqns if e.primitive.name not in ADDITIONS | {"reduce_sum"}]
        read = itertools.chain.from_iterable(e.invars for e in readers)
        needed = {atom for atom in (*read, *jaxpr.outvars) if not isinstance(atom, jex.Literal)}
        return frozenset(out for e in jaxpr.eqns for out in e.outvars).difference(needed)

    return region.remembered("only added", jaxpr, find)


def _logarithms(region: Region, jaxpr: Jaxpr) -> set[Any]:
    """Returns the logarithms that a rule makes float32, and sums with these, which thereby are, too.

    What a loss subtracts from a logarithm of a sum of exponentials is as large as that.
    """
    found: set[Any] = set()
    for equation in jaxpr.eqns:
        name, scope = equation.primitive.name, str(equation.source_info.name_stack)
        follows = name in ADDITIONS and not found.isdisjoint(variables_read(equation))
        if DECIDED in scope or not (follows or (name == "log" and variables_read(equation))):
            continue
        rule, _ = region.decide(equation, scope)
        if rule == ("float32" if name == "log" else None):
            found.update(equation.outvars)
    return found


def _except_for(variables: set[Any], reader: JaxprEqn, refused: Sequence[bool]) -> set[Any]:
    """Returns the variables but for those that stand at a place where an equation refuses them."""
    atoms = chosen(reader.invars, refused)
    return variables.difference(atom for atom in atoms if not isinstance(atom, jex.Literal))
