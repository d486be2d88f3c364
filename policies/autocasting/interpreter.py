"""Runs a traced function again, each operation in the precision that a table of rules gives it.

The function is traced for float32 in place of half inputs, so that literals are not rounded; then its
equations are bound one by one to the real values, which are cast to what the rule says. Values that
are made of literals alone are weak: they follow the dtype of what they meet, as Python numbers do.
"""

import contextlib
import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import user_context
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.attention_logits import logits_of
from jmp_train.policies.autocasting.fp8 import fp8_dot, place_of
from jmp_train.policies.autocasting.integers import integers_in_result, operand
from jmp_train.policies.autocasting.jitted_primitives import bind, cast, float32_product
from jmp_train.policies.autocasting.literal_bounds import UNKNOWN, result_bounds
from jmp_train.policies.autocasting.operand_dtypes import (
    COMPUTED,
    PICKS,
    literals_fit,
    only_added,
    settle,
    wanted,
)
from jmp_train.policies.autocasting.region import (
    ADDITIONS,
    ARITHMETIC,
    DECIDED,
    FLOAT32,
    HALVES,
    INNER_REGION,
    LAYOUT,
    PLACEMENT,
    PRODUCTS,
    TRANSCENDENTAL,
    Decision,
    Region,
    Value,
    argument,
    eligible,
    join,
    literal,
    traced_dtype,
    variables_read,
)
from jmp_train.policies.autocasting.rules import Rule
from jmp_train.policies.autocasting.source_lines import source_of

_READS_AGAIN = frozenset(("gather", "broadcast_in_dim"))  # a value more than once
_SAVES_ITS_INPUT = TRANSCENDENTAL | {"mul", "div"}  # whose gradients need an input or the result


def interpret(region: Region, jaxpr: ClosedJaxpr, values: Sequence[Value]) -> list[Value]:
    """Runs a jaxpr by the rules of a region.

    Args:
      region: the region.
      jaxpr: a jaxpr, with its constants if it has any.
      values: its arguments.
    """
    opened: Any = getattr(jaxpr, "jaxpr", jaxpr)
    constants = getattr(jaxpr, "consts", ())
    environment: dict[Any, Value] = {}
    for variable, constant in zip(opened.constvars, constants, strict=True):
        environment[variable] = region.constant(constant)
    environment.update(zip(opened.invars, values, strict=True))

    def read(atom: Var | Literal) -> Value:
        return literal(atom) if isinstance(atom, jex.Literal) else environment[atom]

    in_float32 = wanted(region, opened, "float32", ARITHMETIC | PICKS | {"stop_gradient"})
    added = only_added(region, opened)
    logits = logits_of(region, opened)
    in_half = wanted(region, opened, "lower", LAYOUT | ARITHMETIC | {"max", "tanh", "logistic"})
    in_half &= {atom for e in opened.eqns if e.primitive.name not in ADDITIONS for atom in variables_read(e)}
    places: Counter[str] = Counter()
    grouped = itertools.groupby(opened.eqns, key=lambda e: str(e.source_info.name_stack))
    for scope, equations in grouped:
        with jax.named_scope(scope) if scope else contextlib.nullcontext():
            for equation in equations:
                inputs = [read(atom) for atom in equation.invars]
                if added.isdisjoint(equation.outvars):  # the result itself is saved
                    inputs = [dataclasses.replace(x, addends=None) if x.addends else x for x in inputs]
                with _at_line_of(equation):
                    place = _place(region, equation, scope, places)
                    outputs = _run(region, equation, scope, place, inputs, in_float32, logits)
                if equation.primitive.name in ARITHMETIC:
                    (output,) = outputs
                    stored = equation.outvars[0] in in_half
                    outputs = [_of_arithmetic(region, equation, output, inputs, stored)]
                environment.update(zip(equation.outvars, outputs, strict=True))
    return [read(atom) for atom in opened.outvars]


def _at_line_of(equation: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Has compilers and profilers name the user's line: where an equation has none, that which calls the region."""
    if not source_of([equation]):
        return contextlib.nullcontext()
    return user_context(equation.source_info.traceback)


def _run(
    region: Region,
    equation: JaxprEqn,
    scope: str,
    place: str,
    inputs: list[Value],
    in_float32: frozenset[Any],
    logits: frozenset[Any],
) -> list[Value]:
    name = equation.primitive.name
    if DECIDED in scope.replace(f"{DECIDED}:", ""):
        rule, reason = "keep", INNER_REGION
    else:
        rule, reason = region.decide(equation, scope)
    if name in region.handlers and _is_entered(rule, equation, inputs):
        forced = rule if rule in ("lower", "float32", "fp8") else region.forced
        inner = dataclasses.replace(region.within(equation, scope, place), forced=forced)
        outputs = region.handlers[name](inner, equation, inputs)
        if outputs is not None:
            return outputs
        rule, reason = "keep", f"{name} is not entered"
    dtypes, rule, reason = settle(region, equation, inputs, rule, reason, in_float32)
    if rule == "lower" and equation.outvars[0] in logits:
        reason = f"{reason}, logits of a softmax"
        arrays = [value.to(region.half) for value in inputs]
        outputs = [Value(float32_product(equation.primitive, arrays, equation.params), product=True)]
    elif rule == "fp8":
        outputs = [_in_8_bits(region, equation, place, inputs)]
    else:
        outputs = _execute(region, equation, inputs, dtypes, rule)
    _note_integers(equation, inputs, outputs)
    if region.log is not None:
        used = [x.dtype if d is None else d for x, d in zip(inputs, dtypes, strict=True)]
        used = [region.recipe.forward_dtype for _ in inputs] if rule == "fp8" else used
        region.log.append(
            Decision(
                path=join(region.path, scope),
                rule=rule,
                reason=reason,
                equation=equation,
                callers=region.callers,
                repeats=region.repeats,
                dtypes_in=tuple(str(dtype) for dtype in used),
                dtypes_out=tuple(str(value.dtype) for value in outputs),
            )
        )
    return outputs


def _note_integers(equation: JaxprEqn, inputs: list[Value], outputs: list[Value]) -> None:
    """Says of results what integers they are made of."""
    name = equation.primitive.name
    if name in PLACEMENT:
        for value, output in zip(inputs, outputs, strict=True):
            output.integers = value.integers
        return
    if name not in ("iota", "convert_element_type") and all(x.integers is None for x in inputs):
        return
    operands = [
        operand(atom, x.integers, weak=x.weak, given=x.origin is not None)
        for atom, x in zip(equation.invars, inputs, strict=True)
    ]
    found = integers_in_result(equation, operands)
    if found is not None:
        for output in outputs:
            output.integers = found


def _is_entered(rule: Rule | None, equation: JaxprEqn, inputs: list[Value]) -> bool:
    """Whether a rule needs the program within to be run by rules, instead of as it was traced."""
    if rule == "float32":  # what is half is saved so for the gradient, and is upcast within
        return equation.primitive.name == "remat2" or any(
            traced_dtype(atom) in HALVES or value.dtype in HALVES
            for atom, value in zip(equation.invars, inputs, strict=True)
        )
    return rule != "keep"


def _execute(region: Region, equation: Any, inputs: list[Value], dtypes: Sequence[Any], rule: Rule) -> list[Value]:
    """Binds a first-order equation to its inputs in the dtypes that were settled."""
    name = equation.primitive.name
    if name == "convert_element_type":
        if rule == "float32" and equation.params["new_dtype"] in HALVES:
            return [Value(inputs[0].to(FLOAT32))]
        return [_convert(equation, inputs[0])]
    upcast = any(
        value.dtype == region.half and not value.weak and dtype == FLOAT32
        for value, dtype in zip(inputs, dtypes, strict=True)
    )
    params = _params(equation, next((d for d in dtypes if d is not None), None))
    if name in TRANSCENDENTAL and dtypes == [FLOAT32] and inputs[0].addends is not None:
        return [_of_sum(equation, inputs[0].addends)]
    if name in _SAVES_ITS_INPUT | PRODUCTS and upcast:
        return [_recomputed(equation, inputs, params)]
    if name in _READS_AGAIN and dtypes[0] == region.half and not inputs[0].weak:
        return [_read_again(equation, inputs, params, region.half)]
    if name in ARITHMETIC and region.half in dtypes and _spreads(equation, inputs):
        return [_spread(equation, inputs, params, region.half)]
    arrays = [value.array if dtype is None else value.to(dtype) for value, dtype in zip(inputs, dtypes, strict=True)]
    outputs = _bind(equation, arrays, inputs, params)
    if name in ("add", "sub") and upcast and _is_smaller(inputs, equation.outvars[0].aval.shape):
        add = functools.partial(_in_float32, equation, params)
        outputs[0].addends = jax.tree_util.Partial(add, *(value.array for value in inputs))
    return outputs


def _place(region: Region, equation: JaxprEqn, scope: str, places: Counter[str]) -> str:
    """Returns the place of an equation where it may be or hold a product whose scales are looked up by it, else ""."""
    may_multiply = equation.primitive.name == "dot_general" or equation.primitive.name in region.handlers
    return place_of(equation, join("", scope), region.place, places) if region.delayed and may_multiply else ""


def _in_8_bits(region: Region, equation: JaxprEqn, place: str, inputs: Sequence[Value]) -> Value:
    """Multiplies in 8 bits, of operands in the dtypes that they have."""
    contract, _ = equation.params["dimension_numbers"]
    dtype = _params(equation, region.half).get("preferred_element_type") or region.half
    lhs, rhs = (on_device(value.array) for value in inputs)
    scales = region.delayed.of(place) if region.delayed else None
    return Value(fp8_dot(lhs, rhs, contract, region.recipe, dtype, scales), product=True)


def _is_smaller(inputs: Sequence[Value], shape: tuple[int, ...]) -> bool:
    """Whether inputs take less memory than a float32 array: one in half, and smaller ones."""
    large = [x.dtype for x in inputs if not x.weak and np.shape(x.array) == shape]
    return len(large) < 2 and all(dtype in HALVES for dtype in large)


def _of_sum(equation: JaxprEqn, addends: jax.tree_util.Partial) -> Value:
    """Binds to a float32 sum, so that not this but what is added is saved for the gradient."""

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def run(addends: jax.tree_util.Partial) -> Any:
        return equation.primitive.bind(addends(), **equation.params)

    return Value(run(addends))


def _in_float32(equation: JaxprEqn, params: dict[str, Any], *arrays: jax.Array) -> Any:
    """Binds to arrays that become float32."""
    upcast = [
        lax.convert_element_type(array, FLOAT32) if eligible(traced_dtype(atom)) else array
        for array, atom in zip(arrays, equation.invars, strict=True)
    ]
    return equation.primitive.bind(*upcast, **params)


def _recomputed(equation: JaxprEqn, inputs: Sequence[Value], params: dict[str, Any]) -> Value:
    """Binds in float32, so that the half inputs, and not the upcast ones, are saved for the gradient."""
    bound = functools.partial(_in_float32, equation, params)
    run = jax.checkpoint(bound, prevent_cse=False)
    return Value(run(*(value.array for value in inputs)))


def _read_again(equation: JaxprEqn, inputs: Sequence[Value], params: dict[str, Any], half: DTypeLike) -> Value:
    """Reads half values more than once by way of float32, in which their gradients are added."""
    arrays = [inputs[0].to(FLOAT32), *(value.array for value in inputs[1:])]
    (output,) = _bind(equation, arrays, inputs, params)
    return dataclasses.replace(output, array=cast(output.array, half))


def _spreads(equation: Any, inputs: Sequence[Value]) -> bool:
    """Whether operands that have gradients are smaller than the result."""
    shape = equation.outvars[0].aval.shape
    return any(not x.weak and np.shape(x.array) != shape for x in inputs)


def _spread(equation: Any, inputs: Sequence[Value], params: dict[str, Any], half: DTypeLike) -> Value:
    """Binds in half; smaller operands are spread in float32, in which their gradients are added."""
    shape = equation.outvars[0].aval.shape

    def in_half(value: Value, array: jax.Array) -> Any:
        if value.weak:
            return value.to(half)
        if array.shape != shape:
            array = jnp.broadcast_to(array.astype(FLOAT32), shape)
        return array.astype(half)

    def run(*arrays: jax.Array) -> Any:
        return equation.primitive.bind(*map(in_half, inputs, arrays), **params)

    if equation.primitive.name in _SAVES_ITS_INPUT:  # the small operands, and not the large ones
        run = jax.checkpoint(run, prevent_cse=False)
    return Value(run(*(value.array for value in inputs)))


def _of_arithmetic(region: Region, equation: JaxprEqn, output: Value, inputs: list[Value], stored: bool) -> Value:
    """Rounds a float32 result of half values to half, if it is stored for the gradient."""
    of_half = any(x.dtype == region.half for x in inputs)
    may_round = output.dtype == FLOAT32 and literals_fit(region, equation, inputs)
    exact = output.integers is None or output.integers.held_by(region.half)
    if stored and may_round and exact and (of_half or any(x.scaled for x in inputs)):
        return Value(output.to(region.half))
    return dataclasses.replace(output, scaled=of_half and equation.primitive.name in ("mul", "div"))


def _convert(equation: JaxprEqn, value: Value) -> Value:
    source, dtype = traced_dtype(equation.invars[0]), equation.params["new_dtype"]
    if eligible(source) and source == dtype:  # it only makes a weak type strong
        return value
    if eligible(source) and eligible(dtype):
        return dataclasses.replace(value, array=value.to(dtype), casts={}, addends=None)
    (output,) = _bind(equation, [value.array], [value], equation.params)
    if source == np.bool_:
        return dataclasses.replace(output, weak=True, bounds=(0.0, 1.0))  # a mask
    return output


def _params(equation: JaxprEqn, dtype: DTypeLike | None) -> dict[str, Any]:
    """Returns the parameters of an equation whose operands have become of a dtype."""
    params = equation.params
    is_product = equation.primitive.name in PRODUCTS
    preferred = params.get("preferred_element_type") if is_product else None
    if preferred is None or dtype is None or not eligible(np.dtype(preferred)):
        return params
    asked_for_upcast = jnp.promote_types(*(traced_dtype(x) for x in equation.invars[:2])) != preferred
    return params if asked_for_upcast else {**params, "preferred_element_type": dtype}


def _bind(equation: JaxprEqn, arrays: Sequence[Any], inputs: Sequence[Value], params: dict[str, Any]) -> list[Value]:
    primitive = equation.primitive
    if primitive.name in ("custom_jvp_call", "custom_vjp_call"):
        results = as_traced(equation, *arrays)
    elif primitive.name in COMPUTED:
        results = bind(primitive, arrays, params)
    else:
        results = primitive.bind(*arrays, **params)
    results = results if primitive.multiple_results else [results]
    if primitive.name in PLACEMENT:
        pairs = zip(inputs, results, strict=True)
        return [dataclasses.replace(value, array=array, casts={}) for value, array in pairs]
    layout = primitive.name in LAYOUT
    floats = [v for v, a in zip(inputs, equation.invars, strict=True) if eligible(traced_dtype(a))]
    weak = bool(inputs) and all(value.weak for value in floats or inputs)
    return [
        Value(
            result,
            weak=weak,
            bounds=result_bounds(equation, [v.bounds for v in inputs]) if weak else UNKNOWN,
            origin=inputs[0].origin if layout else None,
            product=inputs[0].product if layout else primitive.name in PRODUCTS,
        )
        for result in results
    ]


def as_traced(equation: JaxprEqn, *arrays: jax.Array) -> list[Any]:
    """Binds a call to values in their traced dtypes; its rules are Python, and want arrays of jax's."""
    primitive, params = equation.primitive, equation.params
    return primitive.bind(*map(on_device, arrays), **primitive.get_bind_params(params))


def inlined(region: Region, equation: JaxprEqn, inputs: list[Value]) -> list[Value]:
    """Runs the body of a call by the rules of a region."""
    return interpret(region, equation.params["call_jaxpr"], inputs)


def on_arrays(region: Region, jaxpr: ClosedJaxpr, inputs: Sequence[Value] | None = None) -> Callable[..., list[Any]]:
    """Returns a jaxpr, run by the rules of a region, as a function of arrays.

    Args:
      region: the region.
      jaxpr: the program.
      inputs: the values whose arrays it will be given; None if they are others.
    """
    integers = None if inputs is None else [value.integers for value in inputs]

    def run(*arrays: jax.Array) -> list[Any]:
        values = [argument(array) for array in arrays]
        for value, known in zip(values, integers or (), strict=bool(integers)):
            value.integers = known
        outputs = interpret(region.body(), jaxpr, values)
        return [on_device(value.array) for value in outputs]

    return run


def on_device(array: jax.Array) -> Any:
    """Returns an array of NumPy as one of jax's, anything else, such as a reference, as it is."""
    return jnp.asarray(array) if isinstance(array, np.ndarray | np.generic) else array


def values_of(arrays: Sequence[Any]) -> list[Value]:
    """Returns what another program has computed as values."""
    return [Value(array) for array in arrays]
