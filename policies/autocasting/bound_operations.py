"""Binds operations under autocast, in the dtypes that the rules give their operands.

The gradient of a primitive stores its operands as they are bound. If a gradient needs half values, they are upcast
within a checkpoint. Values that are read more than once are read through float32, so that their gradients are added in
float32.
"""

import dataclasses
import functools
import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.typing import DTypeLike

from jmp_train.policies.autocasting.decisions import RuledEquation, literals_fit, settle
from jmp_train.policies.autocasting.fp8 import Extra, convolution_in_few_bits, product_in_few_bits
from jmp_train.policies.autocasting.primitives import (
    ARITHMETIC,
    COMPUTED,
    DERIVED_IN_FLOAT32,
    LAYOUT,
    LIMITS,
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
from jmp_train.policies.autocasting.source_lines import address_of
from jmp_train.policies.autocasting.values import (
    FLOAT32,
    HALVES,
    Value,
    eligible,
    note_integers,
    note_operation,
    results_of,
    traced_dtype,
    upcast_operands,
    without_overflow,
)
from jmp_train.policies.programs import as_jax_array, join

_READS_AGAIN = frozenset(("gather", "broadcast_in_dim"))  # they may read a value more than once
_SAVES_ITS_INPUT = TRANSCENDENTAL | LIMITS | {"mul", "div"}  # their gradients need an input or the result


@dataclasses.dataclass(frozen=True)
class _Operation:
    """An operation whose rule and dtypes are settled, and its operands."""

    region: Region
    step: RuledEquation
    inputs: list[Value]

    @property
    def equation(self) -> Any:
        return self.step.equation

    @property
    def name(self) -> str:
        return self.step.equation.primitive.name

    @property
    def half(self) -> Any:
        return self.region.half

    @property
    def to_half(self) -> bool:
        return self.half in self.step.dtypes

    @property
    def upcasts(self) -> bool:
        """True if a half operand is cast to float32."""
        pairs = zip(self.inputs, self.step.dtypes, strict=True)
        return any(x.dtype == self.half and not x.weak and dtype == FLOAT32 for x, dtype in pairs)

    @functools.cached_property
    def params(self) -> dict[str, Any]:
        """The parameters for operands in their new dtypes: those of products have a result dtype and a precision."""
        step, params = self.step, self.equation.params
        if self.name not in PRODUCTS:
            return params
        dtype, preferred = next((d for d in step.dtypes if d is not None), None), params.get("preferred_element_type")
        if dtype is not None and preferred is not None and eligible(np.dtype(preferred)):
            asked_for_upcast = jnp.promote_types(*map(traced_dtype, self.equation.invars[:2])) != preferred
            params = params if asked_for_upcast else {**params, "preferred_element_type": dtype}
        if step.rule == "float32" or (step.rule == "promote" and FLOAT32 in step.dtypes):
            word = self.region.word_of(self.equation)[0]
            return in_float32(self.name, params, word if word in FLOAT32_RULES else "float32")
        return params

    def bound(self, arrays: Sequence[Any]) -> list[Value]:
        """Returns the results for operands in other dtypes."""
        primitive = self.equation.primitive
        if self.name in ("custom_jvp_call", "custom_vjp_call"):
            results = as_traced(self.equation, *arrays)
        elif self.name in COMPUTED:
            results = bind(primitive, arrays, self.params)
        else:
            results = primitive.bind(*arrays, **self.params)
        return results_of(self.equation, results if primitive.multiple_results else [results], self.inputs)

    @property
    def in_float32(self) -> Callable[..., Any]:
        """A function that returns the result of arrays, cast to float32; it holds no arrays itself."""
        equation, params = self.equation, self.params
        return lambda *arrays: bind_product(equation.primitive, upcast_operands(equation, arrays), params)


def computed(region: Region, step: RuledEquation, inputs: list[Value]) -> list[Value]:
    """Returns the results of an operation by its rule, and records the decision."""
    equation = step.equation
    step = settle(region, step, inputs)
    op = _Operation(region, step, without_overflow(equation, step.dtypes, inputs))
    outputs = _bound(op)
    note_integers(equation, inputs, outputs)
    if region.log is not None:
        used = [x.dtype if d is None else d for x, d in zip(inputs, step.dtypes, strict=True)]
        used = [region.recipe.forward_dtype] * 2 + used[2:] if step.rule == "fp8" else used
        word = product_rule(op.params) if step.rule == "float32" and op.name in PRODUCTS else str(step.rule)
        region.note(equation, step.scope, word, step.reason, used, outputs)
    if op.name in ARITHMETIC:
        outputs = [_saved(op, outputs[0], inputs)]
    note_operation(equation, region.half, inputs, outputs)
    return outputs


def _bound(op: _Operation) -> list[Value]:
    """Returns the results of an operation. How it is bound decides what its gradient stores; the first way applies."""
    step, name, inputs = op.step, op.name, op.inputs
    if step.rule == "fp8":
        few = functools.partial(_in_8_bits, op)

        def lower() -> Value:  # whose casts stay within the branch
            step = dataclasses.replace(op.step, rule="lower")
            return _bound(_Operation(op.region, step, [x.inside() for x in inputs]))[0]

        return [chosen_at_run_time(op.region, op.equation, step.scope, few, lower)]
    if step.rule == "lower" and step.is_logits:
        halves = [x.to(op.half) for x in inputs]
        return [Value(float32_product(op.equation.primitive, halves, op.equation.params), product=True)]
    if name == "convert_element_type":
        return [_converted(op)]
    if name in TRANSCENDENTAL and step.dtypes == [FLOAT32] and inputs[0].addends is not None:
        add, addends = inputs[0].addends
        return [_recomputed(lambda *arrays: op.equation.primitive.bind(add(*arrays), **op.params), addends)]
    if name in _SAVES_ITS_INPUT | PRODUCTS and op.upcasts:
        return [_recomputed(op.in_float32, inputs)]
    if op.to_half and _derivative_leaves_half(op):
        in_float32, half = op.in_float32, op.half
        return [_recomputed(lambda *arrays: cast(in_float32(*arrays), half), inputs)]
    if name in _READS_AGAIN and step.dtypes[0] == op.half and not inputs[0].weak:
        # Read through float32, so that the gradients of all reads are added in float32.
        (output,) = op.bound([inputs[0].to(FLOAT32), *(x.array for x in inputs[1:])])
        return [dataclasses.replace(output, array=cast(output.array, op.half))]
    shape = op.equation.outvars[0].aval.shape if name in ARITHMETIC else ()
    if name in ARITHMETIC and op.to_half and any(not x.weak and np.shape(x.array) != shape for x in inputs):
        return [_spread(op, shape)]
    outputs = op.bound([x.array if d is None else x.to(d) for x, d in zip(inputs, step.dtypes, strict=True)])
    if name in ("add", "sub") and op.upcasts and _is_smaller(inputs, shape):
        outputs[0].addends = op.in_float32, inputs
    if name in LAYOUT - PLACEMENT and outputs[0].dtype == op.half:
        outputs[0].source = _source(op)
    return outputs


def _in_8_bits(op: _Operation) -> Value:
    region, params = op.region, op.params
    dtype = params.get("preferred_element_type") or op.half
    if op.name == "conv_general_dilated":
        lhs, rhs = (as_jax_array(x.array) for x in op.inputs)
        extra = Extra(_scales_at(region, op.step.place))
        return Value(convolution_in_few_bits(lhs, rhs, params, region.recipe, dtype, extra), product=True)
    ragged = params.get("ragged_dot_dimension_numbers")
    numbers = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    return product_in_8_bits(region, op.step.place, op.inputs, numbers, dtype)


def _scales_at(region: Region, place: str) -> jax.Array | None:
    return region.delayed.of(place) if region.delayed else None


def _source(op: _Operation) -> Any:
    """Returns the float32 array from which a moved half array was cast; None if there is none."""
    first, *others = op.inputs
    if op.name == "copy":
        is_stored = first.dtype == FLOAT32 and not first.weak  # by `graph_storage`
        return first.array if is_stored else first.source
    if first.source is None:
        return None
    return op.equation.primitive.bind(first.source, *(x.array for x in others), **op.params)


def _saved(op: _Operation, output: Value, inputs: list[Value]) -> Value:
    """Returns the result of arithmetic, rounded to half if a gradient stores it for readers that compute in half."""
    of_half = any(x.dtype == op.half for x in inputs)
    may_round = output.dtype == FLOAT32 and literals_fit(op.region, op.equation, inputs)
    exact = output.integers is None or output.integers.held_by(op.half)
    if op.step.in_half and may_round and exact and (of_half or any(x.scaled for x in inputs)):
        return Value(output.to(op.half))
    return dataclasses.replace(output, scaled=of_half and op.name in ("mul", "div"))


def product_in_8_bits(
    region: Region, place: str, inputs: Sequence[Value], numbers: lax.DotDimensionNumbers, dtype: DTypeLike
) -> Value:
    """Multiplies by the region's recipe; the operands keep their dtypes. A third one has the sizes of groups."""
    (lhs, rhs), groups = (as_jax_array(x.array) for x in inputs[:2]), inputs[2].array if inputs[2:] else None
    given, batch = [x.given for x in inputs[:2]], numbers[1][0]
    weights = given[0] and not given[1], given[1] or not (any(given) or batch)
    number = None if region.key is None else jnp.uint32(zlib.crc32(place.encode()))
    extra = Extra(_scales_at(region, place), region.key, number, groups)
    return Value(product_in_few_bits(lhs, rhs, numbers, region.recipe, dtype, extra, weights), product=True)


def chosen_at_run_time(
    region: Region, equation: Any, scope: str, few: Callable[[], Value], lower: Callable[[], Value]
) -> Value:
    """Returns a product in few bits, or on trial by `lower` if its flag is not set."""
    if region.flags is None:
        return few()
    around = (*region.callers, equation)
    flag = region.flags(address_of(around, join(region.path, scope)), around)
    dtype = jax.eval_shape(lambda: lower().array).dtype  # the logits of a softmax are float32
    return Value(lax.cond(flag, lambda: few().array.astype(dtype), lambda: lower().array), product=True)


def _converted(op: _Operation) -> Value:
    (value,), source, dtype = op.inputs, traced_dtype(op.equation.invars[0]), op.equation.params["new_dtype"]
    if op.step.rule == "float32" and dtype in HALVES:
        return Value(value.to(FLOAT32))
    if eligible(source) and source == dtype:  # it only makes a weak type strong
        return value
    if eligible(source) and eligible(dtype):
        return dataclasses.replace(value, array=value.to(dtype), casts={}, addends=None, source=None, made=None)
    (output,) = op.bound([value.array])
    if source == np.bool_:
        return dataclasses.replace(output, weak=True, bounds=(0.0, 1.0))  # a mask
    return output


def as_traced(equation: JaxprEqn, *arrays: jax.Array) -> list[Any]:
    """Binds a call to values in their traced dtypes; its custom rules are Python code and need jax arrays."""
    primitive, params = equation.primitive, equation.params
    return primitive.bind(*map(as_jax_array, arrays), **primitive.get_bind_params(params))


def _is_smaller(inputs: Sequence[Value], shape: tuple[int, ...]) -> bool:
    """Returns whether the inputs, one in half and smaller ones, take less memory than a float32 array."""
    large = [x.dtype for x in inputs if not x.weak and np.shape(x.array) == shape]
    return len(large) < 2 and all(dtype in HALVES for dtype in large)


def _derivative_leaves_half(op: _Operation) -> bool:
    """Returns whether jax's derivative rule has intermediate values that half cannot hold, though it holds the result.

    The gradient of a quotient, for example, multiplies by the inverse square of the divisor.
    """
    if op.name in ("reduce_max", "reduce_min"):  # the number of ties
        most, (operand,), (result,) = round(2 / float(jnp.finfo(op.half).eps)), op.equation.invars, op.equation.outvars
        try:
            return math.prod(operand.aval.shape) > most * math.prod(result.aval.shape)
        except jax.errors.InconclusiveDimensionOperation:  # for symbolic shapes
            return True
    return op.name in DERIVED_IN_FLOAT32 and not op.inputs[1 if op.name in ("div", "rem") else 0].weak


def _recomputed(run: Callable[..., Any], inputs: Sequence[Value]) -> Value:
    """Returns the result of `run`; the gradient stores only the inputs and recomputes everything else.

    Half inputs that others read too are read through one float32 value, so that the gradients of all readers are added
    in float32: the gradient of a cross entropy is a small difference of two of them. So are those with a source.
    """
    saved = [value.array for value in inputs]
    halves = [value.dtype in HALVES and not value.weak for value in inputs]
    if not any(half and (x.shared or x.source is not None) for x, half in zip(inputs, halves, strict=True)):
        return Value(jax.checkpoint(run, prevent_cse=False)(*saved))
    arrays = [x.to(FLOAT32) if half else x.array for x, half in zip(inputs, halves, strict=True)]
    return Value(saving(run, arrays, saved, prevent_cse=False))


def _spread(op: _Operation, shape: tuple[int, ...]) -> Value:
    """Binds in half; broadcasts smaller operands in float32, so that their gradients are added in float32."""

    def in_half(value: Value, array: jax.Array) -> Any:
        if value.weak and isinstance(value.array, np.ndarray | np.generic):
            return value.to(op.half)
        if not value.weak and array.shape != shape:
            array = jnp.broadcast_to(array.astype(FLOAT32), shape)
        return array.astype(op.half)

    def run(*arrays: jax.Array) -> Any:
        return op.equation.primitive.bind(*map(in_half, op.inputs, arrays), **op.params)

    saves = op.name in _SAVES_ITS_INPUT  # store the small operands, not the broadcast ones
    return _recomputed(run, op.inputs) if saves else Value(run(*(value.array for value in op.inputs)))
