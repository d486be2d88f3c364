"""Binds operations under autocast, in the dtypes that the rules give their operands.

The gradient of a primitive stores its operands as they are bound. If a gradient needs half values, they are upcast
within a checkpoint. Values that are read more than once are read through float32, so that their gradients are added in
float32.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import JaxprEqn
from jax.extend.source_info_util import user_context
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.decisions import Step, literals_fit, settle
from jmp_train.policies.autocasting.fp8 import fp8_dot
from jmp_train.policies.autocasting.overflows import note_operation, without_overflow
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    COMPUTED,
    DERIVED_IN_FLOAT32,
    LAYOUT,
    PLACEMENT,
    PRODUCTS,
    TRANSCENDENTAL,
    bind,
    bind_product,
    cast,
    float32_product,
    in_float32,
    product_rule,
    saving,
)
from jmp_train.policies.autocasting.region import Region
from jmp_train.policies.autocasting.rules import FLOAT32_RULES
from jmp_train.policies.autocasting.source_lines import source_of
from jmp_train.policies.autocasting.values import (
    FLOAT32,
    HALVES,
    Value,
    eligible,
    note_integers,
    results_of,
    traced_dtype,
    upcast_operands,
)
from jmp_train.policies.programs import on_device

_READS_AGAIN = frozenset(("gather", "broadcast_in_dim"))  # they may read a value more than once
_SAVES_ITS_INPUT = TRANSCENDENTAL | {"mul", "div"}  # their gradients need an input or the result


def computed(region: Region, step: Step, inputs: list[Value]) -> list[Value]:
    """Returns the results of an operation by its rule, and records the decision."""
    equation = step.equation
    step = settle(region, step, inputs)
    outputs = _bound(_Bound(region, step, without_overflow(equation, step.dtypes, inputs)))
    note_integers(equation, inputs, outputs)
    if region.log is not None:
        _note(region, step, inputs, outputs)
    if equation.primitive.name in ARITHMETIC:
        outputs = [_saved(region, step, outputs[0], inputs)]
    note_operation(equation, region.half, inputs, outputs)
    return outputs


def at_line_of(equation: JaxprEqn) -> contextlib.AbstractContextManager[Any]:
    """Makes compilers and profilers name the user's line: the equation's, or else the call of the region."""
    if not source_of([equation]):
        return contextlib.nullcontext()
    return user_context(equation.source_info.traceback)


def _note(region: Region, step: Step, inputs: list[Value], outputs: list[Value]) -> None:
    """Records the decision on an operation for `explain_autocast`."""
    used = [x.dtype if d is None else d for x, d in zip(inputs, step.dtypes, strict=True)]
    used = [region.recipe.forward_dtype for _ in inputs] if step.rule == "fp8" else used
    word = str(step.rule)
    if word == "float32" and step.equation.primitive.name in PRODUCTS:
        word = product_rule(_precise(region, step, step.equation.params))
    region.note(step.equation, step.scope, word, step.reason, used, outputs)


def _precise(region: Region, step: Step, params: dict[str, Any]) -> dict[str, Any]:
    """Returns the parameters of a product, with the precision by which float32 operands are multiplied."""
    if step.rule == "float32" or (step.rule == "promote" and FLOAT32 in step.dtypes):
        word = region.word_of(step.equation)[0]
        return in_float32(step.equation.primitive.name, params, word if word in FLOAT32_RULES else "float32")
    return params


@dataclasses.dataclass(frozen=True)
class _Bound:
    """An operation whose rule and dtypes are settled."""

    region: Region
    step: Step
    inputs: list[Value]

    @property
    def equation(self) -> Any:
        return self.step.equation

    @property
    def name(self) -> str:
        return self.step.equation.primitive.name

    @property
    def to_half(self) -> bool:
        return self.region.half in self.step.dtypes

    @property
    def upcasts(self) -> bool:
        """True if a half operand is cast to float32."""
        pairs = zip(self.inputs, self.step.dtypes, strict=True)
        return any(x.dtype == self.region.half and not x.weak and dtype == FLOAT32 for x, dtype in pairs)

    @property
    def params(self) -> dict[str, Any]:
        """The parameters for operands in their new dtypes."""
        params = _params(self.equation, next((dtype for dtype in self.step.dtypes if dtype is not None), None))
        return _precise(self.region, self.step, params) if self.name in PRODUCTS else params

    @property
    def in_float32(self) -> Callable[..., Any]:
        """The operation on float32 operands."""
        return functools.partial(_in_float32, self.equation, self.params)


def _logits(op: _Bound) -> Value:
    halves = [value.to(op.region.half) for value in op.inputs]
    return Value(float32_product(op.equation.primitive, halves, op.equation.params), product=True)


def _of_addends(op: _Bound) -> Value:
    known: Any = op.inputs[0].addends
    params, (add, addends) = op.params, known
    return _recomputed(lambda *arrays: op.equation.primitive.bind(add(*arrays), **params), addends)


def _rounded_derivative(op: _Bound) -> Value:
    run, half = op.in_float32, op.region.half
    return _recomputed(lambda *arrays: cast(run(*arrays), half), op.inputs)


# How an operation is bound, which decides what its gradient stores: the first way that applies.
_WAYS: tuple[tuple[Callable[[_Bound], Any], Callable[[_Bound], Value]], ...] = (
    (lambda op: op.step.rule == "fp8", lambda op: _in_8_bits(op.region, op.step, op.inputs)),
    (lambda op: op.step.rule == "lower" and op.step.is_logits, _logits),
    (
        lambda op: op.name == "convert_element_type",
        lambda op: _converted(op.equation, op.inputs[0], keeps_float32=op.step.rule == "float32"),
    ),
    (
        lambda op: op.name in TRANSCENDENTAL and op.step.dtypes == [FLOAT32] and op.inputs[0].addends is not None,
        _of_addends,
    ),
    (
        lambda op: op.name in _SAVES_ITS_INPUT | PRODUCTS and op.upcasts,
        lambda op: _recomputed(op.in_float32, op.inputs),
    ),
    (
        lambda op: op.to_half and _derivative_leaves_half(op.equation, op.inputs, op.region.half),
        _rounded_derivative,
    ),
    (
        lambda op: op.name in _READS_AGAIN and op.step.dtypes[0] == op.region.half and not op.inputs[0].weak,
        lambda op: _read_again(op.equation, op.inputs, op.params, op.region.half),
    ),
    (
        lambda op: op.name in ARITHMETIC and op.to_half and _spreads(op.equation, op.inputs),
        lambda op: _spread(op.equation, op.inputs, op.params, op.region.half),
    ),
)


def _bound(op: _Bound) -> list[Value]:
    """Returns the results of an operation."""
    way = next((run for applies, run in _WAYS if applies(op)), None)
    if way is not None:
        return [way(op)]
    pairs, params = zip(op.inputs, op.step.dtypes, strict=True), op.params
    outputs = _bind(op.equation, [x.array if dtype is None else x.to(dtype) for x, dtype in pairs], op.inputs, params)
    if op.name in ("add", "sub") and op.upcasts and _is_smaller(op.inputs, op.equation.outvars[0].aval.shape):
        outputs[0].addends = op.in_float32, op.inputs
    if op.name in LAYOUT - PLACEMENT and outputs[0].dtype == op.region.half:
        outputs[0].source = _source(op.equation, op.inputs, params)
    return outputs


def _source(equation: JaxprEqn, inputs: Sequence[Value], params: dict[str, Any]) -> Any:
    """Returns the float32 array of which a moved array is the half one; None if there is none."""
    first, *others = inputs
    if equation.primitive.name == "copy":
        is_stored = first.dtype == FLOAT32 and not first.weak  # by `graph_storage`
        return first.array if is_stored else first.source
    if first.source is None:
        return None
    return equation.primitive.bind(first.source, *(x.array for x in others), **params)


def _saved(region: Region, step: Step, output: Value, inputs: list[Value]) -> Value:
    """Returns the result of arithmetic, rounded to half if a gradient stores it for readers that compute in half."""
    of_half = any(x.dtype == region.half for x in inputs)
    may_round = output.dtype == FLOAT32 and literals_fit(region, step.equation, inputs)
    exact = output.integers is None or output.integers.held_by(region.half)
    if step.in_half and may_round and exact and (of_half or any(x.scaled for x in inputs)):
        return Value(output.to(region.half))
    return dataclasses.replace(output, scaled=of_half and step.equation.primitive.name in ("mul", "div"))


def _in_8_bits(region: Region, step: Step, inputs: Sequence[Value]) -> Value:
    """Multiplies in 8 bits; the operands keep their dtypes."""
    contract, _ = step.equation.params["dimension_numbers"]
    dtype = _params(step.equation, region.half).get("preferred_element_type") or region.half
    lhs, rhs = (on_device(value.array) for value in inputs)
    scales = region.delayed.of(step.place) if region.delayed else None
    return Value(fp8_dot(lhs, rhs, contract, region.recipe, dtype, scales), product=True)


def _converted(equation: JaxprEqn, value: Value, *, keeps_float32: bool) -> Value:
    source, dtype = traced_dtype(equation.invars[0]), equation.params["new_dtype"]
    if keeps_float32 and dtype in HALVES:
        return Value(value.to(FLOAT32))
    if eligible(source) and source == dtype:  # it only makes a weak type strong
        return value
    if eligible(source) and eligible(dtype):
        return dataclasses.replace(value, array=value.to(dtype), casts={}, addends=None, source=None, made=None)
    (output,) = _bind(equation, [value.array], [value], equation.params)
    if source == np.bool_:
        return dataclasses.replace(output, weak=True, bounds=(0.0, 1.0))  # a mask
    return output


def _params(equation: JaxprEqn, dtype: DTypeLike | None) -> dict[str, Any]:
    """Returns the parameters of an equation whose operands were cast to `dtype`."""
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
    return results_of(equation, results if primitive.multiple_results else [results], inputs)


def as_traced(equation: JaxprEqn, *arrays: jax.Array) -> list[Any]:
    """Binds a call to values in their traced dtypes; its custom rules are Python code and need jax arrays."""
    primitive, params = equation.primitive, equation.params
    return primitive.bind(*map(on_device, arrays), **primitive.get_bind_params(params))


def _is_smaller(inputs: Sequence[Value], shape: tuple[int, ...]) -> bool:
    """Returns whether the inputs, one in half and smaller ones, take less memory than a float32 array."""
    large = [x.dtype for x in inputs if not x.weak and np.shape(x.array) == shape]
    return len(large) < 2 and all(dtype in HALVES for dtype in large)


def _in_float32(equation: JaxprEqn, params: dict[str, Any], *arrays: jax.Array) -> Any:
    """Binds an equation to its arrays, cast to float32."""
    return bind_product(equation.primitive, upcast_operands(equation, arrays), params)


def _derivative_leaves_half(equation: Any, inputs: Sequence[Value], half: DTypeLike) -> bool:
    """Returns whether jax's derivative rule has intermediate values that half cannot hold, though it holds the result.

    The gradient of a quotient, for example, multiplies by the inverse square of the divisor.
    """
    name = equation.primitive.name
    if name in ("reduce_max", "reduce_min"):  # the number of ties
        most, (operand,), (result,) = round(2 / float(jnp.finfo(half).eps)), equation.invars, equation.outvars
        try:
            return math.prod(operand.aval.shape) > most * math.prod(result.aval.shape)
        except jax.errors.InconclusiveDimensionOperation:  # for symbolic shapes
            return True
    divides = name in ("div", "rem")
    return name in DERIVED_IN_FLOAT32 and not inputs[1 if divides else 0].weak


def _recomputed(run: Callable[..., Any], inputs: Sequence[Value]) -> Value:
    """Returns the result of `run`; the gradient stores only the inputs and recomputes everything else.

    Half inputs that others read too are read through one float32 value, so that the gradients of all readers are added
    in float32: the gradient of a cross entropy is a small difference of two of them. So are those with a source.
    """
    saved = [value.array for value in inputs]
    through_float32 = [(x.shared or x.source is not None) and x.dtype in HALVES and not x.weak for x in inputs]
    if not any(through_float32):
        return Value(jax.checkpoint(run, prevent_cse=False)(*saved))
    arrays = [value.to(FLOAT32) if value.dtype in HALVES and not value.weak else value.array for value in inputs]
    return Value(saving(run, arrays, saved, prevent_cse=False))


def _read_again(equation: JaxprEqn, inputs: Sequence[Value], params: dict[str, Any], half: DTypeLike) -> Value:
    """Reads half values more than once through float32, so that their gradients are added in float32."""
    arrays = [inputs[0].to(FLOAT32), *(value.array for value in inputs[1:])]
    (output,) = _bind(equation, arrays, inputs, params)
    return dataclasses.replace(output, array=cast(output.array, half))


def _spreads(equation: Any, inputs: Sequence[Value]) -> bool:
    """Returns whether operands with gradients are smaller than the result."""
    shape = equation.outvars[0].aval.shape
    return any(not x.weak and np.shape(x.array) != shape for x in inputs)


def _spread(equation: Any, inputs: Sequence[Value], params: dict[str, Any], half: DTypeLike) -> Value:
    """Binds in half; broadcasts smaller operands in float32, so that their gradients are added in float32."""
    shape = equation.outvars[0].aval.shape

    def in_half(value: Value, array: jax.Array) -> Any:
        if value.weak and isinstance(value.array, np.ndarray | np.generic):
            return value.to(half)
        if not value.weak and array.shape != shape:
            array = jnp.broadcast_to(array.astype(FLOAT32), shape)
        return array.astype(half)

    def run(*arrays: jax.Array) -> Any:
        return equation.primitive.bind(*map(in_half, inputs, arrays), **params)

    saves = equation.primitive.name in _SAVES_ITS_INPUT  # store the small operands, not the broadcast ones
    return _recomputed(run, inputs) if saves else Value(run(*(value.array for value in inputs)))
